"""Pools that scale to zero on a real node: idle engines stop, and requests wait while one starts."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.waiting import eventually
from e2e.node.conftest import READY_SECONDS, emulated
from e2e.node.sessions import alternating, turns

CLIENTS = 6
ZERO = {"minReplicas": 0, "maxReplicas": 1, "idleSeconds": 10}


@pytest.fixture(scope="module")
def router(kube: Kube) -> str:
    """A DPSRouter whose pools scale to zero."""
    router = emulated("zero")
    for pool in router["spec"]["pools"].values():
        pool.pop("replicas", None)
        pool["autoscaling"] = ZERO
    kube.apply(router)
    kube.until("zero", READY_SECONDS, Ready="True", DemandMeasured="Measured")
    return "zero"


def engines(kube: Kube) -> int:
    """The engine pods that exist."""
    return sum(
        len(kube.list("pods", f"dpsrouter.io/router=zero,dpsrouter.io/component={pool}"))
        for pool in ("speculative", "greedy")
    )


def all_stopped(kube: Kube) -> None:
    """No engine is left, and the router is ready nevertheless."""
    assert engines(kube) == 0
    conditions = {one["type"]: one for one in kube.get("dpsrouter", "zero")["status"]["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    assert {conditions[f"{pool}PoolReady"]["reason"] for pool in ("Speculative", "Greedy")} == {
        "ScaledToZero"
    }


def test_requests_wait_while_pools_start_from_zero_and_none_fails(
    node: Cluster, kube: Kube, router: str
) -> None:
    with node.reach(kube, f"{router}-gateway", 8000) as url, ThreadPoolExecutor(CLIENTS) as clients:
        for _ in range(2):
            eventually(lambda: all_stopped(kube), READY_SECONDS)
            sessions = [
                clients.submit(lambda: list(turns(url, "emulated", alternating(3)))) for _ in range(CLIENTS)
            ]
            answered = [turn for session in sessions for turn in session.result()]
            assert len(answered) == 3 * CLIENTS
        eventually(lambda: all_stopped(kube), READY_SECONDS)
