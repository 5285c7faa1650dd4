"""The chart's alerts and dashboard use existing metrics only, and every alert has a runbook."""

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, Metric

import dps_operator.app  # noqa: F401 - registers the operator's metrics
from dps_gateway.telemetry.metrics import Metrics
from dps_operator.build.network import service_monitor
from dps_operator.build.scaling import autoscalers
from dps_sglang.metrics import PAGES
from dps_testkit.dashboard import dashboard, metrics
from dps_testkit.operator.routers import EVERYTHING, router
from dps_testkit.paths import ROOT

RULES = (ROOT / "charts/dps-router/files/rules.yaml").read_text()
SGLANG = json.loads((ROOT / "tests/local/contract/sglang-0.5.23.json").read_text())["speculative metrics"]
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]}
PANELS: list[dict[str, Any]] = dashboard()["panels"]
EXPRESSIONS = " ".join(target["expr"] for panel in PANELS for target in panel.get("targets", []))
STORAGE = {"sglang:prefetch_bandwidth": "histogram", PAGES: "counter"}
"""Metrics that SGLang, and the plugin, export only with a storage backend, which the recorded servers do not have."""
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def series(families: Iterable[tuple[str, str]]) -> set[str]:
    """The series names of metrics, from their names and types."""
    return {name + suffix for name, kind in families for suffix in SUFFIXES.get(kind, [])}


def typed(found: Iterable[Metric]) -> set[str]:
    return series((family.name, family.type) for family in found)


def test_every_metric_is_exposed_by_gateway_operator_or_sglang() -> None:
    gateway, operator = typed(Metrics().registry.collect()), typed(REGISTRY.collect())
    sglang = series([*((name, shape["type"]) for name, shape in SGLANG.items()), *STORAGE.items()])
    assert metrics(RULES + EXPRESSIONS) - gateway - operator - sglang == set()


def test_autoscalers_of_pools_count_the_requests_that_wait_as_well() -> None:
    """An engine receives no more requests than it can run, so those in flight do not show that a pool is too small."""
    found = {
        metric["object"]["metric"]["name"]
        for autoscaler in autoscalers(router(EVERYTHING))
        for metric in autoscaler["spec"]["metrics"]
        if metric["type"] == "Object"
    }
    assert found == {"dps_demand"}
    assert found <= typed(Metrics().registry.collect())


def test_router_labels_are_set_by_the_service_monitor() -> None:
    (monitor,) = service_monitor(router(EVERYTHING))
    target_labels = {re.sub(r"\W", "_", label) for label in monitor["spec"]["targetLabels"]}
    assert set(re.findall(r"dpsrouter_io_\w+", RULES + json.dumps(dashboard()))) == target_labels


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_severity_summary_description_and_runbook(name: str) -> None:
    alert = ALERTS[name]
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    assert alert["labels"]["severity"] in ("warning", "critical")
    file, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert anchor == name.lower()
    assert re.search(rf"^#+ {name}$", (ROOT / file).read_text(), re.MULTILINE)


def test_every_router_query_uses_the_dashboard_variables() -> None:
    selectors = re.findall(r"\b(?:dps_(?!operator_)|sglang:)[a-z_]+(?:\{[^}]*\})?", EXPRESSIONS)
    variables = '{namespace=~"$namespace",dpsrouter_io_router=~"$router"'
    assert [selector for selector in selectors if variables not in selector] == []
