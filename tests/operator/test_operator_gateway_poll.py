"""Polling the gateways of the DPSRouters that use a feature."""

import asyncio
from typing import Any

import pytest

from dps_operator.errors import GatewaysUnreachableError
from dps_operator.gateway_poll import GatewayPoll, at_intervals, specs_with
from dps_operator.observe import Key, Observations
from dps_operator.work_queue import WorkQueue
from dps_testkit.operator.objects import READY, pod
from dps_testkit.operator.routers import SMALLEST

KEY = ("serving", "qwen")


class Queue(WorkQueue):
    """Records the keys that are added."""

    def __init__(self) -> None:
        self.added: list[Key] = []

    def add(self, key: Key, delay: float = 0.0) -> None:
        self.added.append(key)


def observations(**specs: dict[str, Any]) -> Observations:
    """DPSRouters of the namespace serving, by name, and a gateway of the one named qwen."""
    seen = Observations()
    for name, spec in specs.items():
        seen.update_router({"metadata": {"name": name, "namespace": "serving"}, "spec": spec})
    seen.update_pod(pod("gateway-1", "gateway", podIP="10.0.0.1", conditions=[READY]))
    return seen


def test_only_valid_specs_with_the_feature_are_polled() -> None:
    budget = {"gpuBudget": {"gpus": 2}}
    seen = observations(
        with_budget={**SMALLEST, **budget}, without_budget=SMALLEST, invalid={"model": 1, **budget}
    )
    assert list(specs_with(seen, lambda spec: "gpuBudget" in spec)) == [("serving", "with_budget")]


async def test_a_sample_is_read_from_the_ready_gateways() -> None:
    async def read(addresses: list[str]) -> str:
        return f"read from {addresses}"

    seen = observations(qwen=SMALLEST)
    terminating = pod("gateway-2", "gateway", podIP="10.0.0.2", conditions=[READY])
    terminating["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    seen.update_pod(terminating)
    seen.update_pod(pod("gateway-3", "gateway", podIP="10.0.0.3"))
    seen.update_pod(pod("gateway-4", "gateway", podIP="10.0.0.4", conditions=[{**READY, "status": "False"}]))
    assert await GatewayPoll(seen, Queue(), read, {}).sample(KEY) == "read from ['10.0.0.1']"


async def test_a_router_is_reconciled_when_its_gateways_become_unreachable_or_reachable() -> None:
    problems = ["", "no gateway is ready", "no gateway is ready", ""]
    unmeasured: dict[Key, str] = {}
    queue = Queue()

    async def read(addresses: list[str]) -> int:
        if problem := problems[0]:
            raise GatewaysUnreachableError(problem)
        return 1

    poll = GatewayPoll(observations(qwen=SMALLEST), queue, read, unmeasured)
    found = []
    while problems:
        found.append((await poll.sample(KEY), unmeasured[KEY], len(queue.added)))
        del problems[0]
    assert found == [
        (1, "", 1),
        (None, "no gateway is ready", 2),
        (None, "no gateway is ready", 2),
        (1, "", 3),
    ]


async def test_a_function_is_called_at_intervals_with_the_monotonic_time() -> None:
    times: list[float] = []

    async def once(monotonic: float) -> None:
        times.append(monotonic)
        if len(times) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await at_intervals(0.001, once)
    assert times == sorted(set(times))
