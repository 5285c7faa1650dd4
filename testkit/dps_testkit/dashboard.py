"""The Grafana dashboard as data: its panels' queries, as Grafana would send them."""

import json
import re
from dataclasses import dataclass
from typing import Any

from dps_testkit.paths import ROOT

DASHBOARD = ROOT / "charts/dps-router/files/dashboard.json"
CHOSEN = {"$namespace": ".*", "$router": ".*", "$__rate_interval": "5m"}
"""Grafana's variables, with everything chosen."""
METRIC = re.compile(r"\b(?:dps_|sglang:)[a-z_]+")
"""Every metric here has one of the two prefixes, and nothing else has. dpsrouter_io_… are labels."""


@dataclass(frozen=True)
class Query:
    """One target of a panel."""

    panel: str
    expression: str
    legend: str

    @property
    def labels(self) -> set[str]:
        """The labels that its legend shows."""
        return set(re.findall(r"{{(\w+)}}", self.legend))


def dashboard() -> dict[str, Any]:
    """The document."""
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def queries() -> list[Query]:
    """Every target of every panel, variables filled in."""
    return [
        Query(panel["title"], _filled(target["expr"]), target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def metrics(text: str) -> set[str]:
    """The names of metrics in expressions."""
    return set(METRIC.findall(text))


def _filled(expression: str) -> str:
    for variable, value in CHOSEN.items():
        expression = expression.replace(variable, value)
    return expression
