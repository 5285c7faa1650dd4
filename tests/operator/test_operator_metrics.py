"""The operator's Prometheus metrics and health endpoints."""

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import REGISTRY

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


def failed_reconciles() -> float | None:
    return REGISTRY.get_sample_value("dps_operator_failed_passes", LABELS)


def ready() -> float | None:
    return REGISTRY.get_sample_value("dps_operator_router_ready", LABELS)


async def test_failed_reconciles_are_counted_until_one_succeeds() -> None:
    counted: list[float | None] = []

    async def reconcile(_: Key) -> None:
        counted.append(failed_reconciles())
        if len(counted) <= 2:
            raise ClusterError("unavailable")

    queue = WorkQueue(reconcile)
    queue.add(KEY, 0)
    async with asyncio.timeout(30):
        task = asyncio.create_task(queue.work())
        while len(counted) < 3 or failed_reconciles() is not None:  # noqa: ASYNC110 - a metric has no event
            await asyncio.sleep(0.01)
    task.cancel()
    assert counted == [None, 1, 2]


async def test_ready_metric_is_zero_until_children_are_ready_and_removed_with_the_router(
    harness: OperatorHarness,
) -> None:
    assert ready() == 0
    harness.rolled_out()
    await harness.reconcile()
    assert ready() == 1
    harness.edit({**SMALLEST, "suspend": True})
    await harness.reconcile()
    assert ready() is None
    harness.edit(SMALLEST)
    await harness.reconcile()
    assert ready() is not None
    del harness.cluster.objects["DPSRouter", *KEY]
    await harness.reconcile()
    assert ready() is None


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


async def test_rollout_metric_is_set_until_a_failed_rollout_is_corrected_and_removed_with_the_router(
    harness: OperatorHarness,
) -> None:
    def failed() -> float | None:
        return REGISTRY.get_sample_value("dps_operator_rollout_failed", LABELS)

    assert failed() == 0
    stalled = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    harness.object("Deployment", "qwen-greedy")["status"] = {"conditions": [stalled]}
    await harness.reconcile()
    assert failed() == 1
    harness.available("qwen-greedy")
    await harness.reconcile()
    assert failed() == 0
    del harness.cluster.objects["DPSRouter", *KEY]
    await harness.reconcile()
    assert failed() is None


async def test_replicas_metric_is_zero_while_the_router_is_suspended_and_removed_with_it() -> None:
    def requested() -> list[float | None]:
        return [
            REGISTRY.get_sample_value("dps_operator_pool_replicas", {**LABELS, "pool": pool})
            for pool in ("speculative", "greedy")
        ]

    spec = {**SMALLEST, "pools": {**SMALLEST["pools"], "greedy": {"replicas": 2}}}
    harness = OperatorHarness(spec)
    await harness.reconcile()
    assert requested() == [1, 2]
    harness.edit({**spec, "suspend": True})
    await harness.reconcile()
    assert requested() == [0, 0]
    del harness.cluster.objects["DPSRouter", *KEY]
    await harness.reconcile()
    assert requested() == [None, None]
