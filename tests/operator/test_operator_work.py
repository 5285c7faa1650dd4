"""The queue, the listings, the liveness probe, and how an answer of the API server becomes an error."""

import asyncio
import json
from typing import Any

import pytest

from dps_operator.app import settings_from
from dps_operator.cluster import error_from
from dps_operator.errors import (
    AlreadyExistsError,
    ClusterError,
    NotFoundError,
    NotInstalledError,
    RejectedError,
)
from dps_operator.health import stuck_reason
from dps_operator.kinds import CHILDREN
from dps_operator.observe import Key, Observations
from dps_operator.resync import Resync
from dps_operator.settings import Settings
from dps_operator.work_queue import WorkQueue
from dps_testkit.operator.fake_cluster import FakeCluster
from dps_testkit.operator.routers import SMALLEST

A, B = ("ns", "a"), ("ns", "b")


class Work:
    """Records passes; each waits until it is let go, and fails as often as told."""

    def __init__(self) -> None:
        self.begun: list[Key] = []
        self.go = asyncio.Event()
        self.failures: list[Exception] = []
        self._began = asyncio.Event()

    async def passes(self, count: int) -> None:
        """Wait until so many passes have begun."""
        while len(self.begun) < count:
            self._began.clear()
            await self._began.wait()

    async def __call__(self, key: Key) -> None:
        self.begun.append(key)
        self._began.set()
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)


async def test_events_of_one_router_are_gathered_into_one_pass() -> None:
    work = Work()
    work.go.set()
    queue = WorkQueue(work)
    for _ in range(5):
        queue.add(A, 0)
    queue.add(B, 0)
    async with asyncio.timeout(5):
        tasks = [asyncio.create_task(queue.work()) for _ in range(2)]
        await work.passes(2)
    assert sorted(work.begun) == [A, B]
    for task in tasks:
        task.cancel()


async def test_an_event_during_a_pass_makes_one_more_after_it() -> None:
    work = Work()
    queue = WorkQueue(work)
    queue.add(A, 0)
    async with asyncio.timeout(5):
        tasks = [asyncio.create_task(queue.work()) for _ in range(2)]
        await work.passes(1)
        queue.add(A, 0)
        queue.add(A, 0)
        assert work.begun == [A]
        work.go.set()
        await work.passes(2)
    assert work.begun == [A, A]
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("error", [ClusterError("away"), ValueError("a bug")])
async def test_a_failed_pass_is_repeated(error: Exception) -> None:
    work = Work()
    work.failures = [error]
    work.go.set()
    queue = WorkQueue(work)
    queue.add(A, 0)
    async with asyncio.timeout(10):
        task = asyncio.create_task(queue.work())
        await work.passes(2)
    task.cancel()


async def test_pauses_grow_to_a_limit_and_the_server_may_ask_for_longer_ones() -> None:
    queue = WorkQueue(Work())
    assert [queue._backoff(A, None) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert queue._backoff(B, 90.0) == 90.0


async def test_a_sooner_request_brings_a_later_one_forward() -> None:
    work = Work()
    work.go.set()
    queue = WorkQueue(work)
    queue.add(A, 3600)
    queue.add(A, 0)
    async with asyncio.timeout(5):
        task = asyncio.create_task(queue.work())
        await work.passes(1)
    task.cancel()


def answered(status: int, **body: Any) -> ClusterError:
    return error_from(status, "reason", json.dumps(body))


ANSWERS: dict[str, tuple[ClusterError, type[ClusterError]]] = {
    "no such object": (answered(404, message="x", details={"name": "a"}), NotFoundError),
    "no such kind": (error_from(404, "Not Found", "404 page not found\n"), NotInstalledError),
    "invalid": (answered(422, message="x"), RejectedError),
    "malformed": (answered(400, message="x"), RejectedError),
    "taken": (answered(409, reason="AlreadyExists"), AlreadyExistsError),
    "conflict": (answered(409, reason="Conflict"), ClusterError),
    "forbidden": (answered(403, message="x"), ClusterError),
    "overloaded": (answered(429), ClusterError),
    "broken": (error_from(500, "Internal", None), ClusterError),
}


@pytest.mark.parametrize(("error", "kind"), ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_becomes_an_error(error: ClusterError, kind: type[ClusterError]) -> None:
    assert type(error) is kind


def test_an_error_carries_the_servers_words_and_its_wish_to_wait() -> None:
    error = error_from(429, "Too Many Requests", json.dumps({"message": "later"}), "7")
    assert (str(error), error.status, error.retry_after) == ("later", 429, 7.0)


async def resync(cluster: FakeCluster) -> tuple[Resync, Observations, WorkQueue]:
    seen, queue = Observations(), WorkQueue(Work())
    return Resync(cluster, seen, queue, Settings()), seen, queue


async def test_a_listing_takes_in_everything_and_asks_for_every_router() -> None:
    cluster = FakeCluster()
    cluster.store({"kind": "DPSRouter", "metadata": {"name": "a", "namespace": "ns"}, "spec": SMALLEST})
    cluster.fail["list", "HTTPRoute"] = NotInstalledError("page not found", 404)
    made, seen, _ = await resync(cluster)
    await made.once()
    assert set(seen.routers) == {A}


async def test_a_kind_that_is_installed_later_is_noticed() -> None:
    cluster = FakeCluster()
    cluster.fail["list", "HTTPRoute"] = NotInstalledError("page not found", 404)
    made, _, _ = await resync(cluster)
    await made.once()
    assert {kind.name for kind in CHILDREN} - {kind.name for kind in made.installed} == {"HTTPRoute"}
    assert made.changed.is_set()
    assert not await made.new_kind_installed()
    made.changed.clear()
    cluster.fail["list", "HTTPRoute"] = ClusterError("away")
    assert not await made.new_kind_installed()
    cluster.fail.clear()
    assert await made.new_kind_installed()
    await made.once()
    assert made.installed == CHILDREN
    assert made.changed.is_set()


async def test_a_listing_that_fails_forgets_nothing() -> None:
    cluster = FakeCluster()
    cluster.store({"kind": "DPSRouter", "metadata": {"name": "a", "namespace": "ns"}, "spec": SMALLEST})
    made, seen, _ = await resync(cluster)
    await made.once()
    cluster.fail["list", "Pod"] = ClusterError("away")
    with pytest.raises(ClusterError):
        await made.once()
    assert set(seen.routers) == {A}


async def test_liveness_tells_a_pass_that_hangs_and_a_listing_that_is_overdue() -> None:
    made, _, queue = await resync(FakeCluster())
    settings = Settings(stuck_after=300, resync_seconds=600)
    assert stuck_reason(queue, made, settings) == ""
    queue.running[A] = made.alive - 400
    assert stuck_reason(queue, made, settings).startswith("a reconcile has been running for")
    queue.running.clear()
    made.alive -= 1000
    assert stuck_reason(queue, made, settings).startswith("the listing is overdue by")


def test_settings_come_from_the_environment_and_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPS_OPERATOR_NAMESPACES", "a,b")
    monkeypatch.setenv("DPS_OPERATOR_GATEWAY_IMAGE", "gateway:9")
    made = settings_from(["--workers", "3"])
    assert (made.namespaces, made.gateway_image, made.workers) == (("a", "b"), "gateway:9", 3)
