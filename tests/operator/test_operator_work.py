"""The work queue, listings, the liveness probe, and the mapping of API server errors."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dps_operator.app import stuck_reason
from dps_operator.errors import (
    AlreadyExistsError,
    ClusterError,
    NotFoundError,
    NotInstalledError,
    RejectedError,
    SchemaError,
)
from dps_operator.kube import error_from
from dps_operator.objects import CHILDREN, ROUTER, Key, Kind, Manifest
from dps_operator.observe import Observations
from dps_operator.settings import Settings, parse_options
from dps_operator.watch import Resync
from dps_operator.work_queue import WorkQueue
from dps_testkit.operator.routers import SMALLEST
from tests.operator.fake_cluster import FakeCluster
from tests.operator.objects import pod

A, B = ("ns", "a"), ("ns", "b")
BODY = {"kind": "DPSRouter", "metadata": {"name": "a", "namespace": "ns"}, "spec": SMALLEST}


class RecordedWork:
    """Records reconciles. Each one waits for `go`, then raises the next of `failures`, if any."""

    def __init__(self) -> None:
        self.started: list[Key] = []
        self.go = asyncio.Event()
        self.failures: list[Exception] = []
        self._start_event = asyncio.Event()

    async def reconciles(self, count: int) -> None:
        """Wait until `count` reconciles have started."""
        while len(self.started) < count:
            self._start_event.clear()
            await self._start_event.wait()

    async def __call__(self, key: Key) -> None:
        self.started.append(key)
        self._start_event.set()
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)


@asynccontextmanager
async def workers(queue: WorkQueue, count: int = 1) -> AsyncIterator[None]:
    """Run the workers of a queue, for 10 s at most."""
    tasks = [asyncio.create_task(queue.work()) for _ in range(count)]
    try:
        async with asyncio.timeout(10):
            yield
    finally:
        for task in tasks:
            task.cancel()


async def test_pending_requests_for_a_key_are_merged() -> None:
    work = RecordedWork()
    work.go.set()
    queue = WorkQueue(work)
    for _ in range(5):
        queue.add(A, 0)
    queue.add(B, 0)
    async with workers(queue, 2):
        await work.reconciles(2)
    assert sorted(work.started) == [A, B]


async def test_request_during_a_reconcile_causes_one_more() -> None:
    work = RecordedWork()
    queue = WorkQueue(work)
    queue.add(A, 0)
    async with workers(queue, 2):
        await work.reconciles(1)
        queue.add(A, 0)
        queue.add(A, 0)
        assert work.started == [A]
        work.go.set()
        await work.reconciles(2)
    assert work.started == [A, A]


@pytest.mark.parametrize("error", [ClusterError("unavailable"), ValueError("a bug")])
async def test_failed_reconcile_is_retried(error: Exception) -> None:
    work = RecordedWork()
    work.failures = [error]
    work.go.set()
    queue = WorkQueue(work)
    queue.add(A, 0)
    async with workers(queue):
        await work.reconciles(2)


def error_response(status: int, **body: Any) -> ClusterError:
    return error_from(status, "reason", json.dumps(body))


RESPONSES: dict[str, tuple[ClusterError, type[ClusterError]]] = {
    "object not found": (error_response(404, message="x", details={"name": "a"}), NotFoundError),
    "kind not found": (error_from(404, "Not Found", "404 page not found\n"), NotInstalledError),
    "invalid": (error_response(422, message="x"), RejectedError),
    "malformed": (error_response(400, message="x"), RejectedError),
    "unknown field": (
        error_response(
            500,
            message="failed to create typed patch object (ns/a; apps/v1, Kind=Deployment): "
            ".spec.template.spec.nodeSelectr: field not declared in schema",
        ),
        SchemaError,
    ),
    "already exists": (error_response(409, reason="AlreadyExists"), AlreadyExistsError),
    "conflict": (error_response(409, reason="Conflict"), ClusterError),
    "forbidden": (error_response(403, message="x"), ClusterError),
    "overloaded": (error_response(429), ClusterError),
    "internal error": (error_from(500, "Internal", None), ClusterError),
}


@pytest.mark.parametrize(("error", "kind"), RESPONSES.values(), ids=RESPONSES.keys())
def test_response_is_mapped_to_an_exception(error: ClusterError, kind: type[ClusterError]) -> None:
    assert type(error) is kind


def test_unknown_field_is_not_retried() -> None:
    assert not RESPONSES["unknown field"][0].transient


def test_exception_has_the_servers_message_and_retry_after() -> None:
    error = error_from(429, "Too Many Requests", json.dumps({"message": "later"}), "7")
    assert (str(error), error.status, error.retry_after) == ("later", 429, 7.0)


async def resync(cluster: FakeCluster) -> tuple[Resync, Observations, WorkQueue]:
    seen, queue = Observations(), WorkQueue(RecordedWork())
    return Resync(cluster, seen, queue, Settings()), seen, queue


async def test_router_that_was_deleted_without_an_event_is_reconciled_once_more() -> None:
    """Its metrics and credentials are removed then."""
    seen, work = Observations(), RecordedWork()
    seen.update_router(BODY)
    work.go.set()
    queue = WorkQueue(work)
    await Resync(FakeCluster(), seen, queue, Settings()).once()
    assert seen.routers == {}
    async with workers(queue):
        await work.reconciles(1)
    assert work.started == [A]


ROUTE = {
    "kind": "HTTPRoute",
    "metadata": {"name": "a", "namespace": "ns", "labels": {"dpsrouter.io/router": "a"}},
    "spec": {},
}


async def test_malformed_object_does_not_prevent_a_listing(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster()
    cluster.objects["Deployment", "ns", "broken"] = {"metadata": {"namespace": "ns", "name": "broken"}}
    cluster.store(ROUTE)
    cluster.store(BODY)
    made, seen, _ = await resync(cluster)
    await made.once()
    assert set(seen.routers) == {A}
    assert ("HTTPRoute", "a") in seen.children(A)
    assert "Deployment ns/broken cannot be read" in caplog.text


class _ChangingCluster(FakeCluster):
    """Calls `change` while DPSRouters, the last kind, are listed."""

    change: Callable[[], object] = staticmethod(lambda: None)

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[list[Manifest]]:
        async for page in super().pages(kind, namespace, selector, fields):
            yield page
        if kind is ROUTER:
            self.change()


async def test_changes_that_arrive_during_a_listing_are_kept() -> None:
    cluster = _ChangingCluster()
    metadata = {"name": "qwen", "namespace": "serving"}
    cluster.store({"kind": "DPSRouter", "metadata": metadata, "spec": SMALLEST})
    old, deleted, lost = (cluster.store(pod(name)) for name in ("old", "deleted", "lost"))
    made, seen, _ = await resync(cluster)
    for one in (old, deleted, lost):
        seen.update_pod(one)
    del cluster.objects["Pod", "serving", "lost"]
    newer = {"metadata": {**metadata, "resourceVersion": "99"}, "spec": {**SMALLEST, "suspend": True}}

    def change() -> None:
        seen.update_router(newer)
        seen.update_pod(cluster.store(pod("new")))
        seen.update_pod(deleted, deleted=True)
        seen.update_pod(deleted)

    cluster.change = change
    await made.once()
    assert seen.routers["serving", "qwen"]["spec"]["suspend"]
    assert [one.name for one in seen.pods(("serving", "qwen"))] == ["new", "old"]


async def test_newly_installed_kind_is_detected() -> None:
    cluster = FakeCluster()
    cluster.fail["list", "HTTPRoute"] = NotInstalledError("page not found", 404)
    made, _, _ = await resync(cluster)
    await made.once()
    assert {kind.name for kind in CHILDREN} - {kind.name for kind in made.installed} == {"HTTPRoute"}
    assert not await made.new_kind_installed()
    cluster.fail["list", "HTTPRoute"] = ClusterError("unavailable")
    assert not await made.new_kind_installed()
    cluster.fail.clear()
    assert await made.new_kind_installed()
    await made.once()
    assert made.installed == CHILDREN


async def test_failed_listing_keeps_the_cache() -> None:
    cluster = FakeCluster()
    cluster.store(BODY)
    made, seen, _ = await resync(cluster)
    await made.once()
    cluster.fail["list", "Pod"] = ClusterError("unavailable")
    with pytest.raises(ClusterError):
        await made.once()
    assert set(seen.routers) == {A}


async def test_liveness_detects_a_hanging_reconcile_and_an_overdue_listing() -> None:
    made, _, queue = await resync(FakeCluster())
    settings = Settings(stuck_after=300, resync_seconds=600)
    assert stuck_reason(queue, made, settings) == ""
    queue.running[A] = made.alive - 400
    assert stuck_reason(queue, made, settings).startswith("a reconcile has been running for")
    queue.running.clear()
    made.alive -= 1000
    assert stuck_reason(queue, made, settings).startswith("the listing is overdue by")


def test_settings_are_read_from_environment_and_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPS_OPERATOR_NAMESPACES", "a,b")
    monkeypatch.setenv("DPS_OPERATOR_GATEWAY_IMAGE", "gateway:9")
    monkeypatch.setenv("DPS_OPERATOR_PULL_SECRETS", "mirror,")
    made = parse_options(["--workers", "3"])
    assert made.pull_secrets == ("mirror",)
    assert (made.namespaces, made.gateway_image, made.workers) == (("a", "b"), "gateway:9", 3)
