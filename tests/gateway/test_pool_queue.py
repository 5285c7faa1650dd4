"""The queue of one pool: its order, its limits, and replicas that are lost and recovered meanwhile."""

import asyncio
import random

import pytest

from dps_gateway.upstream.admission import PoolEmpty, Slot
from tests.gateway.engine_pool import NO_REPLICA, SinglePool


async def test_request_that_arrives_later_does_not_overtake_the_queue() -> None:
    engines = SinglePool("a")
    held = await engines.acquire("s", NO_REPLICA, 1.0)
    waiting = await engines.request()
    held.release()
    newcomer = await engines.request()
    assert (await waiting).replica is held.replica
    assert not newcomer.done()
    (await waiting).release()
    assert (await newcomer).replica is held.replica


async def test_queue_moves_away_from_a_hung_replica_and_returns_with_its_next_token() -> None:
    engines = SinglePool("a")
    held = await engines.acquire(None, NO_REPLICA, 1.0)
    waiting = await engines.request()
    engines.mark_hung(held.replica)
    with pytest.raises(PoolEmpty):
        await waiting
    engines.record_token(held.replica)
    held.release()
    assert (await (await engines.request())).replica is held.replica


@pytest.mark.parametrize("seed", range(60))
async def test_no_wake_up_is_lost_and_limits_hold_in_any_sequence_of_events(seed: int) -> None:
    """Random arrivals, releases, cancellations, losses and recoveries of replicas."""
    rng = random.Random(seed)
    engines = SinglePool("a", "b", "c", slots=2, queue=100)
    tasks: list[asyncio.Task[Slot]] = []
    held: list[Slot] = []
    replicas = list(engines.replicas.values())
    for _ in range(200):
        action = rng.random()
        if action < 0.4:
            avoid = frozenset(rng.sample("abc", rng.choice([0, 0, 1])))
            tasks.append(asyncio.create_task(engines.acquire(rng.choice([None, "s"]), avoid, 60.0)))
        elif action < 0.7 and held:
            held.pop(rng.randrange(len(held))).release()
        elif action < 0.8 and tasks:
            rng.choice(tasks).cancel()
        elif action < 0.9:
            engines.mark_unavailable(rng.choice(replicas))
        else:
            engines.mark_available(rng.choice(replicas))
        if rng.random() < 0.7:
            await asyncio.sleep(0)
        held += finished(tasks)
        assert all(0 <= replica.in_flight <= 2 for replica in replicas)
    for replica in replicas:
        engines.mark_available(replica)
    while tasks:
        for slot in held:
            slot.release()
        held = []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        before = len(tasks)
        held = finished(tasks)
        assert held or len(tasks) < before or not tasks, "queued requests although replicas are free"
    for slot in held:
        slot.release()
    assert (engines.in_flight, engines.queued) == (0, 0)


def finished(tasks: "list[asyncio.Task[Slot]]") -> list[Slot]:
    """Remove the finished tasks and return the slots that they were assigned."""
    done = [task for task in tasks if task.done()]
    tasks[:] = [task for task in tasks if not task.done()]
    return [task.result() for task in done if not task.cancelled() and task.exception() is None]


async def test_burst_of_a_tenant_does_not_lengthen_the_wait_of_another() -> None:
    engines = SinglePool("a", queue=1000)
    held = await engines.acquire(None, NO_REPLICA, 60.0)
    served: list[str] = []

    async def request(tenant: str, number: int) -> None:
        with await engines.acquire(f"{tenant}-{number}", NO_REPLICA, 3600.0, tenant):
            served.append(tenant)

    async with asyncio.TaskGroup() as group:
        for tenant, size in (("noisy", 800), ("quiet", 40)):
            for number in range(size):
                group.create_task(request(tenant, number))
        await asyncio.sleep(0)
        held.release()
    assert served[:80].count("quiet") >= 39
