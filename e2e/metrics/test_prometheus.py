"""The dashboard and the alert rules in a real Prometheus that scrapes gateways, engines and operators.

One router is well and one has every fault. What Prometheus then says is written down once; the tests read it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from e2e.cluster.harness import Kube
from e2e.metrics.dashboard import DASHBOARD, Query, metrics, queries
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
    """What Prometheus said when everything was wrong with one router, and after the operators had ended."""

    faults: set[Alert]
    alerts: set[Alert] = field(default_factory=set)
    series: dict[Query, list[dict[str, str]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    routers: set[str] = field(default_factory=set)
    rules: dict[str, str] = field(default_factory=dict)
    alerts_without_operators: set[Alert] = field(default_factory=set)

    async def look(self, prometheus: Prometheus) -> bool:
        """Look at alerts and panels; whether all is there."""
        self.alerts = await alerts(prometheus)
        self.series = {query: await prometheus.query(query.expression) for query in QUERIES}
        return self.alerts == self.faults and all(self.series.values())


@pytest.fixture(scope="module")
def seen(installed: Kube, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("metrics")
    with operators(installed, folder) as control:
        return asyncio.run(watch(control, folder))


async def watch(control: Operators, folder: Path) -> Seen:
    """Let things go wrong, one kind after the other, and write down what Prometheus says."""
    seen = Seen(MISFITS | CUT_STREAMS | LOST | of_operators(control.kube.namespace))
    async with local_routers(folder) as (healthy, faulty):
        targets = [*healthy.targets(), *faulty.targets(), *control.targets()]
        async with Prometheus(folder, targets) as prometheus, traffic(healthy, faulty):
            await until(lambda: raised(MISFITS, prometheus))
            await faulty.cut_streams()
            await until(lambda: raised(CUT_STREAMS, prometheus))
            faulty.lose_everything()
            control.change()
            await until(lambda: seen.look(prometheus))
            chosen = f'dps_in_flight{{namespace=~"{NAMESPACE}"}}'
            seen.names = await prometheus.values("__name__")
            seen.namespaces = await prometheus.values("namespace", "dps_in_flight")
            seen.routers = await prometheus.values("dpsrouter_io_router", chosen)
            seen.rules = await prometheus.rules()
            control.stop()
            await until(lambda: raised(OPERATORS_DOWN, prometheus))
            seen.alerts_without_operators = await alerts(prometheus)
    return seen


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, but not for ever: the tests say what is missing."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - Prometheus has no events
        await asyncio.sleep(0.5)


async def raised(wanted: set[Alert], prometheus: Prometheus) -> bool:
    return wanted <= await alerts(prometheus)


async def alerts(prometheus: Prometheus) -> set[Alert]:
    """The alerts that wait for their time or fire."""
    return {
        (labels["alertname"], *(labels[name] for name in ABOUT if name in labels))
        for labels in await prometheus.alerts()
    }


def test_every_fault_raises_its_alert_and_the_router_that_is_well_has_none(seen: Seen) -> None:
    assert seen.alerts == seen.faults
    assert HEALTHY in seen.routers


def test_operators_that_are_not_scraped_any_more_are_told(seen: Seen) -> None:
    assert seen.alerts_without_operators >= OPERATORS_DOWN


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
