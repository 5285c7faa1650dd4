"""The queue of one pool: its order, its limits, and replicas that are lost and recovered meanwhile."""

import asyncio
import random
from collections.abc import Callable

import pytest

from dps_gateway.upstream.admission import PoolEmpty, PoolFull
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import Replica
from dps_testkit.engine_pool import NO_REPLICA, SinglePool

ANSWERED = [EnginePool.mark_available, EnginePool.record_success]
"""A health check, or a request, that a replica has answered."""


async def test_queued_request_gets_the_replica_that_is_released() -> None:
    engines = SinglePool("a")
    first = await engines.acquire("s", NO_REPLICA, 1.0)
    waiting = asyncio.create_task(engines.acquire("s", NO_REPLICA, 60.0))
    await asyncio.sleep(0)
    assert (engines.in_flight, engines.queued, engines.has_room()) == (1, 1, False)
    engines.release(first)
    assert await waiting is first
    assert (engines.in_flight, engines.queued) == (1, 0)


async def test_queued_requests_are_served_in_order() -> None:
    engines = SinglePool("a")
    held = await engines.acquire("s", NO_REPLICA, 1.0)
    served: list[int] = []

    async def request(number: int) -> None:
        replica = await engines.acquire("s", NO_REPLICA, 60.0)
        served.append(number)
        engines.release(replica)

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(request(number))
            await asyncio.sleep(0)
        engines.release(held)
    assert served == [0, 1, 2, 3, 4]


async def test_full_queue_rejects_immediately() -> None:
    engines = SinglePool("a", queue=0)
    await engines.acquire("s", NO_REPLICA, 1.0)
    with pytest.raises(PoolFull, match="the greedy pool was full, and so is the queue"):
        await engines.acquire("s", NO_REPLICA, 60.0)


async def test_wait_in_the_queue_is_bounded() -> None:
    engines = SinglePool("a")
    await engines.acquire("s", NO_REPLICA, 1.0)
    with pytest.raises(PoolFull, match=r"was busy for 0.01 s"):
        await engines.acquire("s", NO_REPLICA, 0.01)
    assert engines.queued == 0


async def test_cancelled_request_releases_the_replica_it_was_assigned() -> None:
    engines = SinglePool("a")
    held = await engines.acquire("s", NO_REPLICA, 1.0)
    leaving = asyncio.create_task(engines.acquire("s", NO_REPLICA, 60.0))
    staying = asyncio.create_task(engines.acquire("s", NO_REPLICA, 60.0))
    await asyncio.sleep(0)
    engines.release(held)
    leaving.cancel()  # after the assignment, before the task has run
    assert await asyncio.wait_for(staying, 5.0) is held
    assert (engines.in_flight, engines.queued) == (1, 0)


async def test_new_replica_serves_the_queue() -> None:
    engines = SinglePool("a")
    await engines.acquire("s", NO_REPLICA, 1.0)
    waiting = asyncio.create_task(engines.acquire("s", NO_REPLICA, 60.0))
    await asyncio.sleep(0)
    engines.set_endpoints(["a", "b"])
    assert (await asyncio.wait_for(waiting, 5.0)).url == "b"


async def test_request_that_arrives_later_does_not_overtake_the_queue() -> None:
    engines = SinglePool("a")
    held = await engines.acquire("s", NO_REPLICA, 1.0)
    waiting = await engines.request()
    engines.release(held)
    newcomer = await engines.request()
    assert await waiting is held
    assert not newcomer.done()
    engines.release(held)
    assert await newcomer is held


async def test_released_replica_goes_to_the_first_request_that_can_use_it() -> None:
    engines = SinglePool("a", "b")
    a = await engines.acquire(None, frozenset({"b"}), 1.0)
    await engines.acquire(None, frozenset({"a"}), 1.0)
    first, second = await engines.request("a"), await engines.request()
    engines.release(a)
    assert await second is a
    assert (first.done(), engines.queued) == (False, 1)


async def test_queued_requests_fail_at_once_when_the_last_replica_is_lost() -> None:
    engines = SinglePool("a")
    held = await engines.acquire("s", NO_REPLICA, 1.0)
    waiting = [await engines.request() for _ in range(3)]
    engines.mark_unavailable(held)
    engines.release(held)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [PoolEmpty] * 3


async def test_queue_moves_to_the_remaining_replica_when_one_is_lost() -> None:
    engines = SinglePool("a", "b")
    a = await engines.acquire(None, frozenset({"b"}), 1.0)
    b = await engines.acquire(None, frozenset({"a"}), 1.0)
    waiting = [await engines.request(), await engines.request("a"), await engines.request("b")]
    engines.mark_unavailable(a)
    engines.release(a)
    with pytest.raises(PoolEmpty):
        await waiting[2]
    engines.release(b)
    assert await waiting[0] is b
    engines.release(b)
    assert await waiting[1] is b


@pytest.mark.parametrize("answered", ANSWERED)
async def test_recovered_replica_serves_the_queue(answered: Callable[[EnginePool, Replica], None]) -> None:
    engines = SinglePool("a", "b")
    await engines.acquire(None, frozenset({"b"}), 1.0)
    engines.mark_unavailable(engines.replicas["b"])
    waiting = await engines.request()
    answered(engines, engines.replicas["b"])
    assert (await asyncio.wait_for(waiting, 5.0)).url == "b"


async def test_queue_moves_away_from_a_hung_replica_and_returns_with_its_next_token() -> None:
    engines = SinglePool("a")
    held = await engines.acquire(None, NO_REPLICA, 1.0)
    waiting = await engines.request()
    engines.mark_hung(held)
    with pytest.raises(PoolEmpty):
        await waiting
    engines.record_token(held)
    engines.release(held)
    assert await (await engines.request()) is held


async def test_raising_the_limit_admits_queued_requests() -> None:
    engines = SinglePool("a")
    held = await engines.acquire("s", NO_REPLICA, 1.0)
    waiting = await engines.request()
    engines.configure(2, None)
    assert await waiting is held


@pytest.mark.parametrize("seed", range(60))
async def test_no_wake_up_is_lost_and_limits_hold_in_any_sequence_of_events(seed: int) -> None:
    """Random arrivals, releases, cancellations, losses and recoveries of replicas."""
    rng = random.Random(seed)
    engines = SinglePool("a", "b", "c", slots=2, queue=100)
    tasks: list[asyncio.Task[Replica]] = []
    held: list[Replica] = []
    replicas = list(engines.replicas.values())
    for _ in range(200):
        action = rng.random()
        if action < 0.4:
            avoid = frozenset(rng.sample("abc", rng.choice([0, 0, 1])))
            tasks.append(asyncio.create_task(engines.acquire(rng.choice([None, "s"]), avoid, 60.0)))
        elif action < 0.7 and held:
            engines.release(held.pop(rng.randrange(len(held))))
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
        for replica in held:
            engines.release(replica)
        held = []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        before = len(tasks)
        held = finished(tasks)
        assert held or len(tasks) < before or not tasks, "queued requests although replicas are free"
    for replica in held:
        engines.release(replica)
    assert (engines.in_flight, engines.queued) == (0, 0)


def finished(tasks: "list[asyncio.Task[Replica]]") -> list[Replica]:
    """Remove the finished tasks and return the replicas that they were assigned."""
    done = [task for task in tasks if task.done()]
    tasks[:] = [task for task in tasks if not task.done()]
    return [task.result() for task in done if not task.cancelled() and task.exception() is None]


async def finish_one(engines: SinglePool, held: Replica) -> None:
    """Release the only slot of the pool, and let the request that gets it run."""
    engines.release(held)
    for _ in range(3):
        await asyncio.sleep(0)


async def wait_of(quiet: int, bursts: dict[str, int]) -> float:
    """The 95th percentile of the waits of `quiet` requests of one tenant, in completed requests.

    They arrive after the requests of `bursts`, by tenant, at a pool in which one request is in flight at a time.
    """
    engines = SinglePool("a", queue=10_000)
    held = await engines.acquire(None, NO_REPLICA, 60.0)
    served: list[str] = []

    async def request(tenant: str, number: int) -> None:
        await engines.acquire(f"{tenant}-{number}", NO_REPLICA, 3600.0, tenant)
        served.append(tenant)

    arrivals = [(tenant, number) for tenant, size in bursts.items() for number in range(size)]
    arrivals += [("quiet", number) for number in range(quiet)]
    async with asyncio.TaskGroup() as group:
        for tenant, number in arrivals:
            group.create_task(request(tenant, number))
        await asyncio.sleep(0)
        for _ in arrivals:
            await finish_one(engines, held)
    waits = [place for place, tenant in enumerate(served, start=1) if tenant == "quiet"]
    return waits[int(0.95 * len(waits))]


async def test_burst_of_a_tenant_does_not_lengthen_the_wait_of_another() -> None:
    usual = await wait_of(40, {"noisy": 40})
    burst = await wait_of(40, {"noisy": 800})
    assert burst <= 1.2 * usual


async def test_tenants_take_turns_and_so_do_the_sessions_of_a_tenant() -> None:
    engines = SinglePool("a")
    held = await engines.acquire(None, NO_REPLICA, 1.0)
    served: list[str] = []

    async def request(tenant: str, session: str | None, name: str) -> None:
        await engines.acquire(session, NO_REPLICA, 60.0, tenant)
        served.append(name)

    arrivals = [("A", "1", "A1a"), ("A", "1", "A1b"), ("A", "1", "A1c"), ("A", "2", "A2a"), ("A", None, "Ax")]
    arrivals += [("A", None, "Ay"), ("B", "1", "B1a"), ("B", "1", "B1b")]
    async with asyncio.TaskGroup() as group:
        for tenant, session, name in arrivals:
            group.create_task(request(tenant, session, name))
        await asyncio.sleep(0)
        for _ in arrivals:
            await finish_one(engines, held)
    assert served == ["A1a", "B1a", "A2a", "B1b", "Ax", "Ay", "A1b", "A1c"]


async def test_full_queue_drops_the_newest_request_of_the_tenant_with_the_longest_queue() -> None:
    engines = SinglePool("a", queue=3)
    held = await engines.acquire(None, NO_REPLICA, 1.0)

    async def queued(tenant: str) -> "asyncio.Task[Replica]":
        task = asyncio.create_task(engines.acquire(None, NO_REPLICA, 60.0, tenant))
        await asyncio.sleep(0)
        return task

    noisy = [await queued("noisy") for _ in range(3)]
    first = await queued("quiet")
    with pytest.raises(PoolFull, match="and so is the queue"):
        await noisy[2]
    assert engines.queued == 3
    with pytest.raises(PoolFull, match="and so is the queue"):
        await (await queued("quiet"))
    for task in (noisy[0], first, noisy[1]):
        engines.release(held)
        assert await task is held
    assert engines.queued == 0
