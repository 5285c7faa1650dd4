"""What Kopf calls: events of watches, and the tasks that it starts and ends."""

import asyncio
from collections.abc import Callable

import aiohttp
import pytest
from aiohttp import web

from dps_local.processes import free_ports
from dps_operator import lease as leader
from dps_operator.app import Background, Task
from dps_operator.lease import Leadership
from dps_operator.objects import CHILDREN, POD, ROUTER, Key, Kind
from dps_operator.observe import Observations
from dps_operator.watch import note
from dps_testkit.operator.routers import SMALLEST
from tests.operator.fake_cluster import FakeCluster
from tests.operator.objects import pod

KEY = ("serving", "qwen")
LEASE = ("Lease", "system", "dps")


class Events:
    """Passes events to the handler, and records what it enqueues."""

    def __init__(self) -> None:
        self.seen, self.added = Observations(), list[Key]()

    def note(self, kind: Kind, body: dict[str, object], type: str | None = "MODIFIED") -> None:
        note(kind, {"type": type, "object": body}, self.seen, self.added.append)


def router_body() -> dict[str, object]:
    return {"metadata": {"name": "qwen", "namespace": "serving", "uid": "u"}, "spec": SMALLEST}


def service_body() -> dict[str, object]:
    labels = {"dpsrouter.io/router": "qwen"}
    return {"metadata": {"name": "qwen-gateway", "namespace": "serving", "labels": labels}, "spec": {}}


def test_events_update_the_cache_and_enqueue_the_router() -> None:
    events, (service,) = Events(), [kind for kind in CHILDREN if kind.name == "Service"]
    events.note(ROUTER, router_body(), None)
    events.note(service, service_body(), None)
    events.note(POD, pod("qwen-greedy-0", "greedy"))
    assert events.added == [KEY] * 3
    assert list(events.seen.children(KEY)) == [("Service", "qwen-gateway")]
    earlier = pod("qwen-greedy-0", "greedy")
    earlier["metadata"]["uid"] = "another"
    events.note(POD, earlier, "DELETED")
    assert [one.name for one in events.seen.pods(KEY)] == ["qwen-greedy-0"], "it was created again"
    events.note(service, service_body(), "DELETED")
    assert not events.seen.children(KEY)
    events.note(ROUTER, router_body(), "DELETED")
    assert (events.seen.routers, len(events.added)) == ({}, 6)


def test_children_of_an_unknown_router_enqueue_nothing() -> None:
    """A listing at startup may contain them before the DPSRouter, whose own event enqueues it."""
    events = Events()
    events.note(POD, pod("qwen-greedy-0", "greedy"), None)
    assert events.added == []


class Tasks:
    """The background tasks of a process with a Lease; `task` runs once it leads."""

    def __init__(self, *tasks: Task) -> None:
        self.cluster, self.stop = FakeCluster(), asyncio.Event()
        (self.port,) = free_ports(1)
        self.leadership = Leadership(self.cluster, "system/dps")
        self.background = Background(self.leadership, tasks, web.Application(), self.port, self.stop)

    def holder(self) -> str:
        return str(self.cluster.objects[LEASE]["spec"]["holderIdentity"])


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not check():  # noqa: ASYNC110 - what is checked sets no event
            await asyncio.sleep(0.01)


async def test_tasks_run_while_the_lease_is_held_and_end_before_it_is_released() -> None:
    holders: list[str] = []

    async def task() -> None:
        holders.append(made.holder())
        try:
            await asyncio.Event().wait()
        finally:
            holders.append(made.holder())

    made = Tasks(task)
    await made.background.start()
    await until(lambda: holders)
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{made.port}/") as answer:
        assert answer.status == 404, "the endpoints are served"
    await made.background.end()
    assert holders[0] == holders[1] != ""
    assert (made.holder(), made.stop.is_set(), made.background.failed) == ("", False, False)


async def test_a_replica_without_the_lease_runs_no_task() -> None:
    ran = asyncio.Event()

    async def task() -> None:
        ran.set()

    made = Tasks(task)
    held = Leadership(made.cluster, "system/dps")
    leading = asyncio.create_task(held.run())
    await until(held.leading.is_set)
    await made.background.start()
    await asyncio.sleep(0.05)
    assert not ran.is_set()
    await made.background.end()
    assert made.holder() != ""
    leading.cancel()


async def test_a_failed_task_ends_the_others_and_the_process() -> None:
    ended = asyncio.Event()

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fails() -> None:
        raise ValueError("a bug")

    made = Tasks(other, fails)
    await made.background.start()
    await asyncio.wait_for(made.stop.wait(), 5)
    assert (ended.is_set(), made.background.failed) == (True, True)
    await made.background.end()
    assert made.holder() == ""


async def test_a_lost_lease_ends_the_tasks_and_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RENEW_SECONDS", 0.01)

    async def forever() -> None:
        await asyncio.Event().wait()

    made = Tasks(forever)
    await made.background.start()
    await until(made.leadership.leading.is_set)
    made.cluster.objects[LEASE]["spec"]["holderIdentity"] = "b"
    await asyncio.wait_for(made.stop.wait(), 5)
    assert made.background.failed
    await made.background.end()
    assert made.holder() == "b"
