"""The chart's alerts and dashboard use existing metrics only, and docs/monitoring.md covers all of them."""

import json
import re
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, Metric

import dps_operator.app  # noqa: F401 - registers the operator's metrics
from dps_gateway.telemetry.metrics import Metrics
from dps_operator.builders.monitoring import service_monitor
from dps_operator.builders.scaling import autoscalers
from dps_sglang.metrics import PAGES
from dps_testkit.dashboard import dashboard, metrics
from dps_testkit.operator.routers import EVERYTHING, router

ROOT = Path(__file__).parent.parent
RULES = (ROOT / "charts/dps-router/files/rules.yaml").read_text()
PAGE = (ROOT / "docs/monitoring.md").read_text()
VALUES = yaml.safe_load((ROOT / "charts/dps-router/values.yaml").read_text())
SGLANG = json.loads((ROOT / "tests/local/contract/sglang-0.5.23.json").read_text())["speculative metrics"]
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]}
PANELS: list[dict[str, Any]] = dashboard()["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
EXPRESSIONS = " ".join(target["expr"] for panel in GRAPHS for target in panel["targets"])
UNITS = {"reqps", "ops", "percentunit", "s", "short"}
STORAGE = {"sglang:prefetch_bandwidth": "histogram", PAGES: "counter"}
"""Metrics that SGLang, and the plugin, export only with a storage backend, which the recorded servers do not have."""
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def title(panel: dict[str, Any]) -> str:
    return str(panel["title"])


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
    assert "seriesQuery: dps_demand{" in (ROOT / "docs/operating.md").read_text()


def test_readme_states_the_number_of_alerts() -> None:
    found = re.search(r"\[Grafana dashboard and (\d+)\s+alerts\]", (ROOT / "README.md").read_text())
    assert found is not None
    assert int(found[1]) == len(ALERTS)


def test_page_lists_every_operator_metric() -> None:
    exposed = {family.name for family in REGISTRY.collect() if family.name.startswith("dps_operator_")}
    named = {name.removesuffix("_total") for name in metrics(PAGE)}
    assert {name for name in named if name.startswith("dps_operator_")} == exposed


def test_router_labels_are_set_by_the_service_monitor() -> None:
    (monitor,) = service_monitor(router(EVERYTHING))
    target_labels = {re.sub(r"\W", "_", label) for label in monitor["spec"]["targetLabels"]}
    assert set(re.findall(r"dpsrouter_io_\w+", RULES + json.dumps(dashboard()))) == target_labels


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_summary_description_and_runbook(name: str) -> None:
    alert = ALERTS[name]
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["annotations"]["runbook"] == f"docs/monitoring.md#{name.lower()}"
    assert f"\n### {name}\n\n" in PAGE


def test_page_has_one_section_per_alert() -> None:
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == set(ALERTS)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", PAGE))
def test_anchor_in_page_is_a_heading(link: str) -> None:
    file, _, anchor = link.partition("#")
    text = (ROOT / "docs" / (file or "monitoring.md")).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_values_in_page_are_chart_values() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    documented = yaml.safe_load(block)["monitoring"]
    assert {name: set(values) for name, values in documented.items()} == {
        name: {"enabled"} for name in VALUES["monitoring"]
    }


def test_page_lists_the_rows_of_the_dashboard() -> None:
    rows = [title(panel) for panel in PANELS if panel["type"] == "row"]
    table = PAGE.partition("## The dashboard")[2].partition("## ")[0]
    assert re.findall(r"^\| ([A-Z][\w ]+) \|", table, re.MULTILINE) == rows


@pytest.mark.parametrize("panel", GRAPHS, ids=title)
def test_panel_has_data_source_unit_and_description(panel: dict[str, Any]) -> None:
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["description"]


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [
        (box["x"], box["y"], box["x"] + box["w"], box["y"] + box["h"])
        for box in (panel["gridPos"] for panel in PANELS)
    ]
    assert all(right <= 24 for _, _, right, _ in places)
    overlapping = [
        pair
        for pair in combinations(places, 2)
        if max(pair[0][0], pair[1][0]) < min(pair[0][2], pair[1][2])
        and max(pair[0][1], pair[1][1]) < min(pair[0][3], pair[1][3])
    ]
    assert overlapping == []


def test_every_router_query_uses_the_dashboard_variables() -> None:
    selectors = re.findall(r"\b(?:dps_(?!operator_)|sglang:)[a-z_]+(?:\{[^}]*\})?", EXPRESSIONS)
    variables = '{namespace=~"$namespace",dpsrouter_io_router=~"$router"'
    assert [selector for selector in selectors if variables not in selector] == []
