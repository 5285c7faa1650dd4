"""Reconciliation succeeds despite a failing API server, a killed operator, or a second running operator."""

import itertools

import pytest
from aiohttp import web

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator, StartOperator
from dps_testkit.paths import ROOT
from dps_testkit.waiting import eventually
from e2e.cluster.faults import Fault, FaultyServer
from e2e.cluster.routers import router

pytest_plugins = ["e2e.cluster.fixtures"]

KINDS = (
    "configmap,deployment,horizontalpodautoscaler,networkpolicy,persistentvolumeclaim,poddisruptionbudget,"
    "role,rolebinding,service,serviceaccount,statefulset"
)


def children(kube: Kube) -> list[Manifest]:
    return kube.list(KINDS, "dpsrouter.io/router=qwen")


def settled(kube: Kube, seconds: float = 120) -> None:
    def check() -> None:
        names = [(item["kind"], item["metadata"]["name"]) for item in children(kube)]
        assert len(names) == len(set(names)) == 15

    eventually(check, seconds)
    kube.until("qwen", seconds, Ready="True", Progressing="Settled")


def every(nth: int, status: int) -> Fault:
    """Fail every nth request, except watches."""
    count = itertools.count(1)
    return lambda request: status if "watch" not in request.query and next(count) % nth == 0 else None


def every_other_write_conflicts() -> Fault:
    count = itertools.count(1)
    return lambda request: 409 if request.method != "GET" and next(count) % 2 == 0 else None


def watches_end(request: web.Request) -> int | None:
    return 410 if "watch" in request.query and next(_WATCHES) % 2 else None


_WATCHES = itertools.count()

FAULTS: dict[str, Fault] = {
    "every third call is throttled": every(3, 429),
    "every third call fails": every(3, 500),
    "every other write conflicts": every_other_write_conflicts(),
    "every third connection is cut": every(3, 0),
    "half of the watches have expired": watches_end,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_router_becomes_ready_despite_intermittent_api_server_errors(
    kube: Kube, start_operator: StartOperator, fault: Fault
) -> None:
    with FaultyServer(kube).running() as server:
        server.fault = fault
        start_operator(server=server.url)
        kube.apply(router())
        settled(kube)
        assert server.answered.total() > 0


def test_changes_during_an_api_server_outage_are_applied_afterwards(
    kube: Kube, start_operator: StartOperator
) -> None:
    with FaultyServer(kube).running() as server:
        operator = start_operator(server=server.url)
        kube.apply(router())
        settled(kube)
        server.fault = lambda _: 0
        kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 7}}})
        kube.kubectl("delete", "service", "qwen-greedy")
        eventually(lambda: _has_failed(server, 20), 120)
        assert operator.get("/healthz") == "ok"
        server.fault = lambda _: None
        settled(kube)
        assert kube.get("dpsrouter", "qwen")["status"]["routing"]["thresholdTokens"] == 7


def _has_failed(server: FaultyServer, calls: int) -> None:
    assert server.answered.total() > calls


@pytest.mark.parametrize("calls", [3, 9, 15, 21])
def test_successor_completes_the_reconciliation_of_a_killed_operator(
    kube: Kube, start_operator: StartOperator, calls: int
) -> None:
    written = itertools.count(1)
    with FaultyServer(kube).running() as server:
        # All later writes fail, so the operator is killed in the middle of a reconciliation.
        server.fault = lambda request: 0 if request.method != "GET" and next(written) > calls else None
        operator = start_operator(server=server.url)
        kube.apply(router())
        eventually(lambda: _has_failed(server, 0), 60)
        operator.kill()
    start_operator()
    settled(kube)
    assert kube.get("secret", "dps-router-credentials")["data"]["qwen-redis.password"]


def test_one_of_two_replicas_reconciles_and_the_other_takes_over(
    kube: Kube, start_operator: StartOperator
) -> None:
    system, lease = Kube(kube.kubeconfig, "dps-system"), ("--lease", "dps-system/dps-dps-router")
    options = ("--set", "replicas=2", "--show-only", "templates/leader.yaml")
    chart = system.helm("template", "dps", str(ROOT / "charts/dps-router"), *options)
    system.kubectl("apply", "--filename", "-", stdin=chart)
    first = start_operator(*lease)
    kube.apply(router())
    settled(kube)
    second = start_operator(*lease)

    def waits() -> None:
        try:
            second.get("/readyz")
        except OSError as error:
            raise AssertionError("the second operator does not answer yet") from error

    eventually(waits)
    assert (leading(first), leading(second), second.writes()) == (1, 0, 0)
    assert first.stop() == 0
    kube.apply(router(pools={"greedy": {"replicas": 2}}))

    def taken_over() -> None:
        assert kube.get("deployment", "qwen-greedy")["spec"]["replicas"] == 2

    eventually(taken_over)
    assert leading(second) == 1


def leading(operator: Operator) -> float:
    """The operator's metric dps_operator_leader."""
    lines = operator.get("/metrics").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("dps_operator_leader "))
