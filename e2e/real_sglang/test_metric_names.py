"""SGLang exports the metrics that the chart's alerts and dashboard read."""

import re

from dps_testkit.dashboard import DASHBOARD, metrics
from dps_testkit.paths import ROOT
from e2e.real_sglang.local_sglang import VENV, install

RULES = ROOT / "charts/dps-router/files/rules.yaml"
DEFINED = re.compile(r'"(sglang:[a-z_]+)"')
SUFFIX = re.compile(r"_(total|sum|count|bucket)$")
"""Suffixes that Prometheus' client library adds to names."""


def test_sglang_exports_the_metrics_of_alerts_and_dashboard() -> None:
    install()
    (package,) = VENV.glob("lib/python3*/site-packages/sglang")
    source = "".join(path.read_text() for path in package.glob("srt/**/*.py"))
    defined = {SUFFIX.sub("", name) for name in DEFINED.findall(source)}
    read = {SUFFIX.sub("", name) for name in metrics(RULES.read_text() + DASHBOARD.read_text())}
    assert {name for name in read if name.startswith("sglang:")} <= defined
