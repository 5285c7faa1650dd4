"""The operator's Prometheus metrics and health endpoints."""

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import REGISTRY

from dps_operator.errors import ClusterError
from dps_operator.health import application
from dps_operator.observe import Observations
from dps_operator.reconcile import READY, REPLICAS, ROLLOUT_FAILED, Reconciler
from dps_operator.resync import Resync
from dps_operator.settings import Settings
from dps_operator.work_queue import FAILED, WorkQueue
from dps_testkit.operator.fake_cluster import FakeCluster
from dps_testkit.operator.harness import OperatorHarness
from dps_testkit.operator.routers import SETTINGS, SMALLEST

KEY = ("serving", "qwen")
LABELS = {"router_namespace": "serving", "router": "qwen"}


@pytest.fixture(autouse=True)
def _clear_metrics() -> Iterator[None]:
    for gauge in (READY, FAILED, ROLLOUT_FAILED, REPLICAS):
        gauge.clear()
    yield
    for gauge in (READY, FAILED, ROLLOUT_FAILED, REPLICAS):
        gauge.clear()


class Reconciles:
    """Fails `failures` times, then succeeds. Records the metric's value at the start of each reconcile."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.counted: list[float | None] = []
        self.good = asyncio.Event()

    async def __call__(self, key: tuple[str, str]) -> None:
        self.counted.append(failed_reconciles())
        if len(self.counted) <= self._failures:
            raise ClusterError("unavailable")
        self.good.set()


def failed_reconciles() -> float | None:
    return REGISTRY.get_sample_value("dps_operator_failed_passes", LABELS)


def ready() -> float | None:
    return REGISTRY.get_sample_value("dps_operator_router_ready", LABELS)


async def test_failed_reconciles_are_counted_until_one_succeeds() -> None:
    reconciles = Reconciles(failures=2)
    queue = WorkQueue(reconciles)
    queue.add(KEY, 0)
    async with asyncio.timeout(30):
        task = asyncio.create_task(queue.work())
        await reconciles.good.wait()
        while failed_reconciles() is not None:  # noqa: ASYNC110 - a metric has no event
            await asyncio.sleep(0)
    task.cancel()
    assert reconciles.counted == [None, 1, 2]


async def test_ready_metric_is_zero_until_children_are_ready_and_removed_with_the_router() -> None:
    cluster, seen = FakeCluster(), Observations()
    reconciler = Reconciler(cluster, seen, SETTINGS, lambda: "2026-01-01T00:00:00Z")
    router = {"kind": "DPSRouter", "metadata": {"name": "qwen", "namespace": "serving"}, "spec": SMALLEST}
    seen.update_router(cluster.store(router))
    await reconciler.reconcile(KEY)
    assert ready() == 0
    seen.replace(Observations())
    await reconciler.reconcile(KEY)
    assert ready() is None


async def test_listing_failure_metric_is_set_until_a_listing_succeeds() -> None:
    cluster = FakeCluster()
    cluster.fail["list", "Pod"] = ClusterError("forbidden")
    made = Resync(cluster, Observations(), WorkQueue(Reconciles(0)), Settings())
    async with asyncio.timeout(30):
        task = asyncio.create_task(made.run())
        while REGISTRY.get_sample_value("dps_operator_listing_failing") != 1:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        cluster.fail.clear()
        await made.complete.wait()
    task.cancel()
    assert REGISTRY.get_sample_value("dps_operator_listing_failing") == 0


async def test_age_of_the_oldest_reconcile_is_computed_at_scrape_time() -> None:
    queue = WorkQueue(Reconciles(0))
    made = Resync(FakeCluster(), Observations(), queue, Settings())
    queue.running[KEY] = made.alive - 400
    async with TestClient(TestServer(application(queue, made, *events(), Settings()))) as client:
        answer = await (await client.get("/metrics")).text()
    (age,) = [line for line in answer.splitlines() if line.startswith("dps_operator_oldest_pass_seconds ")]
    assert float(age.split()[1]) >= 400


def events() -> tuple[asyncio.Event, asyncio.Event]:
    """`leading` and `watching` of a replica that waits for the Lease."""
    return asyncio.Event(), asyncio.Event()


async def test_replica_that_waits_for_the_lease_is_ready_and_healthy() -> None:
    queue = WorkQueue(Reconciles(0))
    made = Resync(FakeCluster(), Observations(), queue, Settings())
    made.alive -= 100_000
    async with TestClient(TestServer(application(queue, made, *events(), Settings()))) as client:
        assert (await client.get("/readyz")).status == 200
        assert (await client.get("/healthz")).status == 200


async def test_readiness_requires_established_watches() -> None:
    queue, (leading, watching) = WorkQueue(Reconciles(0)), events()
    leading.set()
    made = Resync(FakeCluster(), Observations(), queue, Settings())
    async with TestClient(TestServer(application(queue, made, leading, watching, Settings()))) as client:
        assert (await client.get("/readyz")).status == 503
        watching.set()
        assert (await client.get("/readyz")).status == 200


async def test_suspended_router_has_no_ready_metric() -> None:
    cluster, seen = FakeCluster(), Observations()
    reconciler = Reconciler(cluster, seen, SETTINGS, lambda: "2026-01-01T00:00:00Z")
    metadata = {"name": "qwen", "namespace": "serving"}
    router = {"kind": "DPSRouter", "metadata": metadata, "spec": SMALLEST}
    seen.update_router(cluster.store(router))
    await reconciler.reconcile(KEY)
    assert ready() == 0
    seen.update_router(cluster.store({**router, "spec": {**SMALLEST, "suspend": True}}))
    await reconciler.reconcile(KEY)
    assert ready() is None


async def test_rollout_metric_is_set_until_a_failed_rollout_is_corrected_and_removed_with_the_router() -> (
    None
):
    def failed() -> float | None:
        return REGISTRY.get_sample_value("dps_operator_rollout_failed", LABELS)

    harness = OperatorHarness(SMALLEST)
    await harness.reconcile()
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
