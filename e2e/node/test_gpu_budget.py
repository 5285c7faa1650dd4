"""A GPU budget on a real node: over a day whose mix of turns changes, a replica follows the load between the pools.

Then it follows the rule that a calibration has found.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from threading import Event

from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.waiting import eventually
from e2e.node.conftest import READY_SECONDS, emulated
from e2e.node.sessions import LONG, SHORT, turns

CLIENTS = 8
ANSWER_TOKENS = 400
DAY = (
    ((LONG, LONG), {"speculative": 1, "greedy": 2}),
    ((SHORT, SHORT), {"speculative": 2, "greedy": 1}),
    ((LONG, LONG), {"speculative": 1, "greedy": 2}),
)
"""Night, noon and the next night: the questions of all sessions, which determine the pools of their turns, and the
replicas of each pool that follow from them."""
BOTH = (LONG, SHORT)
"""The questions of a session that uses both pools. Its turn in the greedy pool takes longer, so that with equal loads
the greedy pool keeps its two replicas."""
LOAD_RATIO = 0.1
"""A speculative replica should have a tenth of the requests of a greedy one."""
CALIBRATED = {
    "policy": "DeltaPrefill",
    "objective": "session",
    "seconds": 1.0,
    "verdict": "Two pools are the right answer.",
    "gpuBudget": {"speculativeReplicas": 2, "greedyReplicas": 1, "loadRatio": LOAD_RATIO},
    "time": "2026-01-01T00:00:00Z",
}
"""The result of a calibration, which `test_calibration.py` runs. The gateways keep their policy with it."""


def test_replicas_follow_the_load_over_a_day_and_no_request_fails(node: Cluster, kube: Kube) -> None:
    router = emulated("budget")
    router["spec"]["gpuBudget"] = {"gpus": 3, "cooldownSeconds": 10}
    router["spec"]["routing"] = {"calibration": {"apply": True, "schedule": "0 0 1 1 *"}}
    router["spec"]["gateway"]["replicas"] = 1
    kube.apply(router)
    kube.until("budget", READY_SECONDS, Ready="True", Progressing="Settled", DemandMeasured="Measured")
    assert replicas(kube) == {"speculative": 2, "greedy": 1}
    stopped = Event()
    questions = DAY[0][0]
    agents = count()
    with node.reach(kube, "budget-gateway", 8000) as url, ThreadPoolExecutor(CLIENTS) as clients:

        def load() -> int:
            """Sessions one after the other; the number of answers. Raises if a request fails."""
            answered = 0
            while not stopped.is_set():
                # A prompt that was sent before has not grown, so each session has one of its own.
                agent = f"You are agent {next(agents)}."
                session = turns(url, "emulated", questions, ANSWER_TOKENS, agent)
                answered += len(list(session))
            return answered

        running = [clients.submit(load) for _ in range(CLIENTS)]
        try:
            for questions, expected in DAY:  # noqa: B007, `load` uses the questions
                eventually(partial(moved, kube, expected), READY_SECONDS)
            assert kube.get("dpsrouter", "budget")["status"]["gpuBudget"]["rule"] == "EqualLoad"
            questions = BOTH
            result = {"status": {"routing": {"recommended": CALIBRATED}}}
            kube.patch("dpsrouter", "budget", result, "--subresource", "status")
            eventually(partial(moved, kube, {"speculative": 2, "greedy": 1}), READY_SECONDS)
        finally:
            stopped.set()
        assert sum(one.result() for one in running) > 0
    kube.until("budget", READY_SECONDS, Ready="True", Progressing="Settled")
    assert kube.get("dpsrouter", "budget")["status"]["gpuBudget"]["rule"] == "Calibrated"
    message = kube.condition("budget", "DemandMeasured")["message"]
    assert f"towards {LOAD_RATIO:g} times as many requests per speculative replica" in message
    kube.kubectl("delete", "dpsrouter", "budget")


def replicas(kube: Kube) -> dict[str, int]:
    """The ready replicas of each pool."""
    pools = kube.get("dpsrouter", "budget")["status"]["pools"]
    return {name: pool["readyReplicas"] for name, pool in pools.items()}


def moved(kube: Kube, expected: dict[str, int]) -> None:
    """The replica has moved, and is ready."""
    assert replicas(kube) == expected
    assert kube.get("dpsrouter", "budget")["status"]["gpuBudget"]["lastMoveTime"]
