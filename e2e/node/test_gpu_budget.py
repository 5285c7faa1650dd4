"""A GPU budget on a real node: under load of one pool, a replica of the other one moves to it."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.waiting import eventually
from e2e.node.conftest import READY_SECONDS, emulated
from e2e.node.sessions import turns

CLIENTS = 8
ANSWER_TOKENS = 400


def test_a_replica_moves_to_the_loaded_pool_and_no_request_fails(node: Cluster, kube: Kube) -> None:
    router = emulated("budget")
    router["spec"] |= {
        "gpuBudget": {"gpus": 3, "cooldownSeconds": 10},
        "routing": {"policy": "AlwaysGreedy"},
    }
    router["spec"]["gateway"]["replicas"] = 1
    kube.apply(router)
    kube.until("budget", READY_SECONDS, Ready="True", Progressing="Settled", DemandMeasured="Measured")
    assert replicas(kube) == {"speculative": 2, "greedy": 1}
    stopped = Event()
    with node.reach(kube, "budget-gateway", 8000) as url, ThreadPoolExecutor(CLIENTS) as clients:

        def load() -> int:
            """Sessions one after the other; the number of answers. Raises if a request fails."""
            answered = 0
            while not stopped.is_set():
                answered += len(list(turns(url, "emulated", count=2, answer_tokens=ANSWER_TOKENS)))
            return answered

        running = [clients.submit(load) for _ in range(CLIENTS)]
        try:
            eventually(lambda: moved(kube), READY_SECONDS)
        finally:
            stopped.set()
        assert sum(one.result() for one in running) > 0
    kube.until("budget", READY_SECONDS, Ready="True", Progressing="Settled")
    kube.kubectl("delete", "dpsrouter", "budget")


def replicas(kube: Kube) -> dict[str, int]:
    """The ready replicas of each pool."""
    pools = kube.get("dpsrouter", "budget")["status"]["pools"]
    return {name: pool["readyReplicas"] for name, pool in pools.items()}


def moved(kube: Kube) -> None:
    """The replica has moved, and is ready."""
    assert replicas(kube) == {"speculative": 1, "greedy": 2}
    assert kube.get("dpsrouter", "budget")["status"]["gpuBudget"]["lastMoveTime"]
