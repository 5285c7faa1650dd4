"""SGLang 0.5.8.post1 and 0.5.23 export the metrics that the chart's alerts and dashboard read."""

import re
from pathlib import Path

import pytest

from dps_testkit.dashboard import DASHBOARD, metrics
from dps_testkit.paths import ROOT
from e2e.real_sglang.local_sglang import VENV, install

RULES = ROOT / "charts/dps-router/files/rules.yaml"
DEFINED = re.compile(r'"(sglang:[a-z_]+)"')
SUFFIX = re.compile(r"_(total|sum|count|bucket)$")
"""Suffixes that Prometheus' client library adds to names."""

LACKING: dict[str, set[str]] = {
    "0.5.8.post1": {"sglang:kv_cache_memory_usage_gb", "sglang:spec_verify_calls"},
    "0.5.23": set(),
}
"""Metrics that a version lacks. The first is read for the common prefix cache only, which 0.5.8.post1 cannot use. The
alert that reads the second falls back to `sglang:spec_accept_length`."""


@pytest.fixture(scope="module", params=LACKING)
def version(request: pytest.FixtureRequest) -> str:
    install()
    name: str = request.param
    return name


def package(version: str) -> Path:
    """The folder of the installed package `sglang`."""
    if version == "0.5.23":
        (found,) = VENV.glob("lib/python3*/site-packages/sglang")
        return found
    return VENV / f"sglang-{version}/sglang"


def test_version_exports_the_metrics_of_alerts_and_dashboard(version: str) -> None:
    source = "".join(path.read_text() for path in package(version).glob("srt/**/*.py"))
    defined = {SUFFIX.sub("", name) for name in DEFINED.findall(source)}
    read = {SUFFIX.sub("", name) for name in metrics(RULES.read_text() + DASHBOARD.read_text())}
    assert {name for name in read if name.startswith("sglang:")} - defined == LACKING[version]
