"""The chart's Grafana dashboard: its panels and their queries, with variables substituted."""

import json
import re
from dataclasses import dataclass
from typing import Any

from dps_testkit.paths import ROOT

DASHBOARD = ROOT / "charts/dps-router/files/dashboard.json"
VARIABLES = {"$namespace": ".*", "$router": ".*", "$__rate_interval": "5m"}
"""Values for Grafana's variables that select every series."""
METRIC = re.compile(r"\b(?:dps_|sglang:)[a-z_]+")
"""Matches metric names only: labels have the prefix dpsrouter_io_."""


@dataclass(frozen=True)
class Query:
    """One target of a panel."""

    panel: str
    expression: str
    legend: str

    @property
    def labels(self) -> set[str]:
        """The labels used in the legend."""
        return set(re.findall(r"{{(\w+)}}", self.legend))


def dashboard() -> dict[str, Any]:
    """The parsed dashboard."""
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def queries() -> list[Query]:
    """The queries of all panels."""
    return [
        Query(panel["title"], _substituted(target["expr"]), target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def metrics(text: str) -> set[str]:
    """The metric names used in PromQL expressions."""
    return set(METRIC.findall(text))


def _substituted(expression: str) -> str:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression
