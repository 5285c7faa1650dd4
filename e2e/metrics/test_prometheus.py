"""The dashboard and the alert rules in a real Prometheus that scrapes gateways, engines and operators.

One router is well and one has every fault. What Prometheus then says is written down once; the tests read it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.dashboard import DASHBOARD, Query, metrics, queries
from e2e.metrics.operators import READY, WAITING, Operators, operators
from e2e.metrics.prometheus import RULES, Prometheus
from e2e.metrics.routers import FAULTY, HEALTHY, NAMESPACE, local_routers, traffic

pytest_plugins = ["e2e.cluster.fixtures"]

Alert = tuple[str, ...]
"""An alert's name, and what it is about."""

ABOUT = ("namespace", "dpsrouter_io_router", "pool", "router_namespace", "router")
PATIENCE_SECONDS = 90.0
QUERIES = queries()
MISFITS: set[Alert] = {
    ("DPSSpeculationNotAccepted", NAMESPACE, FAULTY),
    ("DPSTokenCountMismatch", NAMESPACE, FAULTY),
}
"""Of a draft model and a chat template that do not fit. Only answers that have ended show it."""
CUT_STREAMS: set[Alert] = {
    ("DPSEngineFailures", NAMESPACE, FAULTY, "greedy"),
    ("DPSEngineFailures", NAMESPACE, FAULTY, "speculative"),
}
LOST: set[Alert] = {
    ("DPSSessionStateDegraded", NAMESPACE, FAULTY),
    ("DPSPoolEmpty", NAMESPACE, FAULTY, "greedy"),
    ("DPSPoolEmpty", NAMESPACE, FAULTY, "speculative"),
    ("DPSNoEngine", NAMESPACE, FAULTY),
    ("DPSErrorRate", NAMESPACE, FAULTY),
    ("DPSConfigurationRefused", NAMESPACE, FAULTY),
}
OPERATORS_DOWN: set[Alert] = {("DPSOperatorDown",)}


def of_operators(namespace: str) -> set[Alert]:
    """Alerts about an operator that may not list, one that may not write, and a DPSRouter without a volume."""
    return {
        ("DPSOperatorCannotList", "may-nothing"),
        ("DPSReconcileFailing", namespace, READY),
        ("DPSReconcileFailing", namespace, WAITING),
        ("DPSRouterNotReady", namespace, WAITING),
    }


@dataclass
class Seen:
    """What Prometheus said while more and more was wrong with one router."""

    faults: set[Alert]
    """The alerts that there should be."""
    raised: set[Alert] = field(default_factory=set)
    """Every alert that there was at some time, and those at the end."""
    alerts: set[Alert] = field(default_factory=set)
    series: dict[Query, list[dict[str, str]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    routers: set[str] = field(default_factory=set)
    rules: dict[str, str] = field(default_factory=dict)

    async def look(self, prometheus: Prometheus) -> None:
        """Look at alerts and panels."""
        self.alerts = {
            (labels["alertname"], *(labels[name] for name in ABOUT if name in labels))
            for labels in await prometheus.alerts()
        }
        self.raised |= self.alerts
        for query in QUERIES:
            self.series[query] = await prometheus.query(query.expression) or self.series.get(query, [])


@pytest.fixture(scope="module")
def seen(installed: Kube, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("metrics")
    with operators(installed, folder) as control:
        return asyncio.run(watch(control, folder))


async def watch(control: Operators, folder: Path) -> Seen:
    """Let things go wrong, one kind after the other, and write down what Prometheus says."""
    seen = Seen(faults=MISFITS | CUT_STREAMS | LOST | OPERATORS_DOWN | of_operators(control.kube.namespace))
    async with local_routers(folder) as (healthy, faulty):
        targets = [*healthy.targets(), *faulty.targets(), *control.targets()]
        async with Prometheus(folder, targets) as prometheus, traffic(healthy, faulty):

            async def until(reached: Callable[[], bool]) -> None:
                """Look again and again, but not for ever: the tests say what is missing."""
                deadline = time.monotonic() + PATIENCE_SECONDS
                await seen.look(prometheus)
                while not reached() and time.monotonic() < deadline:
                    await asyncio.sleep(0.5)
                    await seen.look(prometheus)

            await until(lambda: seen.raised >= MISFITS)
            await faulty.cut_streams()
            await until(lambda: seen.raised >= CUT_STREAMS)
            faulty.lose_everything()
            control.change()
            await until(lambda: seen.raised >= seen.faults - OPERATORS_DOWN and all(seen.series.values()))
            chosen = f'dps_in_flight{{namespace=~"{NAMESPACE}"}}'
            seen.names = await prometheus.values("__name__")
            seen.namespaces = await prometheus.values("namespace", "dps_in_flight")
            seen.routers = await prometheus.values("dpsrouter_io_router", chosen)
            seen.rules = await prometheus.rules()
            control.stop()
            await until(lambda: seen.raised >= seen.faults and seen.alerts <= seen.faults)
    return seen


def test_every_fault_raises_its_alert(seen: Seen) -> None:
    assert seen.faults - seen.raised == set()


def test_what_is_well_has_none(seen: Seen) -> None:
    assert seen.alerts - seen.faults == set()


def test_every_rule_can_be_evaluated(seen: Seen) -> None:
    assert set(seen.rules.values()) == {"ok"}


def test_every_metric_that_a_rule_or_a_panel_names_is_scraped(seen: Seen) -> None:
    assert metrics(RULES.read_text() + DASHBOARD.read_text()) - seen.names == set()


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.panel}: {query.legend}")
def test_a_panel_shows_something_with_every_label_of_its_legend(query: Query, seen: Seen) -> None:
    assert seen.series[query]
    assert [labels for labels in seen.series[query] if not query.labels <= set(labels)] == []


def test_the_dashboards_variables_offer_what_there_is(seen: Seen) -> None:
    assert (seen.namespaces, seen.routers) == ({NAMESPACE}, {HEALTHY, FAULTY})
