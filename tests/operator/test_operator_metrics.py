"""The operator's Prometheus metrics and health endpoints."""

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import REGISTRY

from dps_engines.pools import POOLS
from dps_operator.app import application
from dps_operator.errors import ClusterError
from dps_operator.objects import Key
from dps_operator.reconcile import READY, REPLICAS, ROLLOUT_FAILED
from dps_operator.settings import Settings
from dps_operator.watch import Resync
from dps_operator.work_queue import FAILED, WorkQueue
from dps_testkit.operator.routers import SMALLEST
from tests.operator.harness import KEY, OperatorHarness

LABELS = {"router_namespace": "serving", "router": "qwen"}


@pytest.fixture(autouse=True)
def _clear_metrics() -> Iterator[None]:
    for gauge in (READY, FAILED, ROLLOUT_FAILED, REPLICAS):
        gauge.clear()
    yield
    for gauge in (READY, FAILED, ROLLOUT_FAILED, REPLICAS):
        gauge.clear()


def value(name: str, **labels: str) -> float | None:
    """A metric of the DPSRouter."""
    return REGISTRY.get_sample_value(f"dps_operator_{name}", {**LABELS, **labels})


def values() -> tuple[float | None, float | None, list[float | None]]:
    """Whether the DPSRouter is ready, whether a rollout has failed, and the replicas of its pools."""
    replicas = [value("pool_replicas", pool=pool) for pool in POOLS]
    return value("router_ready"), value("rollout_failed"), replicas


async def test_failed_reconciles_are_counted_until_one_succeeds() -> None:
    counted: list[float | None] = []

    async def reconcile(_: Key) -> None:
        counted.append(value("failed_passes"))
        if len(counted) <= 2:
            raise ClusterError("unavailable")

    queue = WorkQueue(reconcile)
    queue.add(KEY, 0)
    async with asyncio.timeout(30):
        task = asyncio.create_task(queue.work())
        while len(counted) < 3 or value("failed_passes") is not None:  # noqa: ASYNC110 - a metric has no event
            await asyncio.sleep(0.01)
    task.cancel()
    assert counted == [None, 1, 2]


async def test_metrics_state_readiness_failed_rollouts_and_replicas_and_are_removed_with_the_router() -> None:
    spec = {**SMALLEST, "pools": {**SMALLEST["pools"], "greedy": {"replicas": 2}}}
    harness = OperatorHarness(spec)
    await harness.reconcile()
    assert values() == (0, 0, [1, 2])
    harness.rolled_out()
    stalled = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    harness.object("Deployment", "qwen-greedy")["status"] = {"conditions": [stalled]}
    await harness.reconcile()
    assert values() == (0, 1, [1, 2])
    harness.rolled_out()
    await harness.reconcile()
    assert values() == (1, 0, [1, 2])
    harness.edit({**spec, "suspend": True})
    await harness.reconcile()
    assert values() == (None, 0, [0, 0])
    harness.edit(spec)
    await harness.reconcile()
    assert value("router_ready") is not None
    del harness.cluster.objects["DPSRouter", *KEY]
    await harness.reconcile()
    assert values() == (None, None, [None, None])


async def test_replica_that_waits_for_the_lease_is_ready_and_healthy_and_a_leader_after_a_listing(
    harness: OperatorHarness,
) -> None:
    queue, leading = WorkQueue(harness.reconciler.reconcile), asyncio.Event()
    made = Resync(harness.cluster, harness.seen, queue, Settings())
    made.alive -= 100_000
    async with TestClient(TestServer(application(queue, made, leading, Settings()))) as client:
        assert (await client.get("/readyz")).status == 200
        assert (await client.get("/healthz")).status == 200
        leading.set()
        assert (await client.get("/readyz")).status == 503
        assert (await client.get("/healthz")).status == 500
        made.complete.set()
        assert (await client.get("/readyz")).status == 200
