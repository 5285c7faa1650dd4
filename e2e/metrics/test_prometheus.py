"""The dashboard and the alert rules in a real Prometheus that scrapes gateways, engines and operators.

One router is healthy, one has every fault, and one is suspended. A fixture records what Prometheus reports; the tests
check the record.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dps_sglang.metrics import PAGES
from dps_testkit.cluster.kube import Kube
from dps_testkit.dashboard import DASHBOARD, Query, metrics, queries
from e2e.metrics.operators import READY, SUSPENDED, WAITING, Operators, operators
from e2e.metrics.prometheus import RULES, Prometheus, Target
from e2e.metrics.routers import FAULTY, HEALTHY, NAMESPACE, labels, local_routers, traffic

pytest_plugins = ["e2e.cluster.fixtures"]

Alert = tuple[str, ...]
"""An alert's name and its identifying labels."""

IDENTIFYING_LABELS = (
    "namespace",
    "dpsrouter_io_router",
    "pool",
    "dpsrouter_io_component",
    "router_namespace",
    "router",
)
PATIENCE_SECONDS = 120.0
QUERIES = queries()
SCRAPED = metrics(RULES.read_text() + DASHBOARD.read_text()) - {f"{PAGES}_total"}
"""The metrics in rules and panels. Emulated engines have no plugin; unit tests of the plugin and of the alerts cover
its metric."""
MISCONFIGURED: set[Alert] = {
    ("DPSSpeculationNotAccepted", NAMESPACE, FAULTY),
    ("DPSTokenCountMismatch", NAMESPACE, FAULTY),
    ("DPSPrefixCacheSlow", NAMESPACE, FAULTY, "speculative"),
}
"""Alerts caused by the rejected drafts, the other chat template and the slow storage, from which only the speculative
engine has to fetch enough. They are detected in complete answers only."""
CUT_STREAMS: set[Alert] = {
    ("DPSEngineFailures", NAMESPACE, FAULTY, "greedy"),
    ("DPSEngineFailures", NAMESPACE, FAULTY, "speculative"),
}
BROKEN: set[Alert] = {
    ("DPSSessionStateDegraded", NAMESPACE, FAULTY),
    ("DPSPoolEmpty", NAMESPACE, FAULTY, "greedy"),
    ("DPSPoolEmpty", NAMESPACE, FAULTY, "speculative"),
    ("DPSNoEngine", NAMESPACE, FAULTY),
    ("DPSErrorRate", NAMESPACE, FAULTY),
    ("DPSConfigurationRefused", NAMESPACE, FAULTY),
}
OPERATORS_DOWN: set[Alert] = {("DPSOperatorDown",)}


def of_operators(namespace: str) -> set[Alert]:
    """Alerts for an operator without list permission, one without write permission, and an unbound volume."""
    return {
        ("DPSOperatorCannotList", "unprivileged"),
        ("DPSReconcileFailing", namespace, READY),
        ("DPSReconcileFailing", namespace, WAITING),
        ("DPSReconcileFailing", namespace, SUSPENDED),
        ("DPSRouterNotReady", namespace, WAITING),
    }


@dataclass
class Record:
    """The alerts and series that Prometheus reported while faults were added to one router."""

    namespace: str
    """The namespace of the DPSRouters; that of the local routers is NAMESPACE."""
    faults: set[Alert]
    """The expected alerts."""
    raised: set[Alert] = field(default_factory=set)
    """Every alert reported at any time; `alerts` are those of the last check."""
    alerts: set[Alert] = field(default_factory=set)
    empty: set[str] = field(default_factory=set)
    """The routers whose gateway had no ready engine at the last check."""
    series: dict[Query, list[dict[str, str]]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    routers: set[str] = field(default_factory=set)
    rules: dict[str, str] = field(default_factory=dict)

    async def update(self, prometheus: Prometheus) -> None:
        """Query all alerts and panels."""
        self.alerts = {
            (labels["alertname"], *(labels[name] for name in IDENTIFYING_LABELS if name in labels))
            for labels in await prometheus.alerts()
        }
        self.raised |= self.alerts
        empty = await prometheus.query("sum by (dpsrouter_io_router) (dps_ready_replicas) == 0")
        self.empty = {found["dpsrouter_io_router"] for found in empty}
        self.names |= await prometheus.values("__name__")
        for query in QUERIES:
            self.series[query] = await prometheus.query(query.expression) or self.series.get(query, [])


@pytest.fixture(scope="module")
def record(installed: Kube, tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("metrics")
    with operators(installed, folder) as control:
        return asyncio.run(watch(control, folder))


async def watch(control: Operators, folder: Path) -> Record:
    """Inject one fault after another and record what Prometheus reports."""
    namespace = control.kube.namespace
    faults = MISCONFIGURED | CUT_STREAMS | BROKEN | OPERATORS_DOWN | of_operators(namespace)
    record = Record(namespace, faults)
    async with local_routers(folder) as (healthy, faulty, stopped):
        targets = [*healthy.targets(), *faulty.targets(), *control.targets()]
        targets.append(Target(stopped.admin, labels(namespace, SUSPENDED, "metrics")))
        async with Prometheus(folder, targets) as prometheus, traffic(healthy, faulty):

            async def until(reached: Callable[[], bool]) -> None:
                """Poll until `reached`, with a time limit; the tests report what is missing."""
                deadline = time.monotonic() + PATIENCE_SECONDS
                await record.update(prometheus)
                while not reached() and time.monotonic() < deadline:
                    await asyncio.sleep(0.5)
                    await record.update(prometheus)

            await until(lambda: record.raised >= MISCONFIGURED)
            await faulty.cut_streams()
            await until(lambda: record.raised >= CUT_STREAMS)
            faulty.break_everything()
            control.change()
            await until(
                lambda: (
                    record.raised >= record.faults - OPERATORS_DOWN
                    and all(record.series.values())
                    and record.empty == {FAULTY, SUSPENDED}
                    and record.names >= SCRAPED  # the operator may only have begun
                )
            )
            selector = f'dps_in_flight{{namespace=~"{NAMESPACE}"}}'
            record.namespaces = await prometheus.values("namespace", "dps_in_flight")
            record.routers = await prometheus.values("dpsrouter_io_router", selector)
            record.rules = await prometheus.rules()
            control.stop()
            await until(lambda: record.raised >= record.faults and record.alerts <= record.faults)
    return record


def test_every_fault_raises_its_alert(record: Record) -> None:
    assert record.faults - record.raised == set()


def test_healthy_components_raise_no_alert(record: Record) -> None:
    assert record.alerts - record.faults == set()


def test_suspended_router_raises_no_alert_about_missing_engines(record: Record) -> None:
    assert SUSPENDED in record.empty
    of_engines = [alert for alert in record.alerts if alert[0] in ("DPSNoEngine", "DPSPoolEmpty")]
    assert {router for _, _, router, *_ in of_engines} == {FAULTY}


def test_every_rule_can_be_evaluated(record: Record) -> None:
    assert set(record.rules.values()) == {"ok"}


def test_every_metric_in_rules_and_panels_is_scraped(record: Record) -> None:
    assert SCRAPED - record.names == set()


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.panel}: {query.legend}")
def test_panel_has_data_with_every_label_of_its_legend(query: Query, record: Record) -> None:
    assert record.series[query]
    assert [labels for labels in record.series[query] if not query.labels <= set(labels)] == []


def test_dashboard_variables_list_namespaces_and_routers(record: Record) -> None:
    assert (record.namespaces, record.routers) == ({NAMESPACE, record.namespace}, {HEALTHY, FAULTY})
