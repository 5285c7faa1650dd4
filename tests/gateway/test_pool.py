"""A pool of replicas: places, the queue for them, and replicas that come and go."""

import asyncio

import pytest

from dps_gateway.pool import Pool
from dps_gateway.upstream.pool import EnginePool, PoolEmpty, PoolFull

NOBODY: frozenset[str] = frozenset()


def pool(*urls: str, places: int = 1, queue: int = 10) -> EnginePool:
    result = EnginePool(Pool.GREEDY, places, queue)
    result.set_endpoints(urls)
    return result


async def test_a_request_waits_for_a_place_and_gets_the_one_that_is_given_back() -> None:
    engines = pool("a")
    first = await engines.acquire("s", NOBODY, 1.0)
    waiting = asyncio.create_task(engines.acquire("s", NOBODY, 60.0))
    await asyncio.sleep(0)
    assert (engines.in_flight, engines.queued, engines.has_room) == (1, 1, False)
    engines.release(first)
    assert await waiting is first
    assert (engines.in_flight, engines.queued) == (1, 0)


async def test_waiting_requests_are_served_in_order() -> None:
    engines = pool("a")
    held = await engines.acquire("s", NOBODY, 1.0)
    served: list[int] = []

    async def request(number: int) -> None:
        replica = await engines.acquire("s", NOBODY, 60.0)
        served.append(number)
        engines.release(replica)

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(request(number))
            await asyncio.sleep(0)
        engines.release(held)
    assert served == [0, 1, 2, 3, 4]


async def test_a_full_queue_refuses_at_once() -> None:
    engines = pool("a", queue=0)
    await engines.acquire("s", NOBODY, 1.0)
    with pytest.raises(PoolFull, match="the greedy pool and its queue are full"):
        await engines.acquire("s", NOBODY, 60.0)


async def test_a_wait_that_is_too_long_ends() -> None:
    engines = pool("a")
    await engines.acquire("s", NOBODY, 1.0)
    with pytest.raises(PoolFull, match=r"was busy for 0.01 s"):
        await engines.acquire("s", NOBODY, 0.01)
    assert engines.queued == 0


async def test_an_abandoned_wait_passes_its_place_on() -> None:
    engines = pool("a")
    held = await engines.acquire("s", NOBODY, 1.0)
    leaving = asyncio.create_task(engines.acquire("s", NOBODY, 60.0))
    staying = asyncio.create_task(engines.acquire("s", NOBODY, 60.0))
    await asyncio.sleep(0)
    engines.release(held)
    leaving.cancel()  # just as the place is its own
    assert await asyncio.wait_for(staying, 5.0) is held
    assert (engines.in_flight, engines.queued) == (1, 0)


async def test_no_ready_replica_is_told_apart_from_a_busy_pool() -> None:
    engines = pool("a", "b")
    engines.replicas["a"].failed()
    with pytest.raises(PoolEmpty, match="no replica of the greedy pool is ready"):
        await engines.acquire("s", frozenset({"b"}), 1.0)
    engines.replicas["a"].succeeded()
    assert (await engines.acquire("s", frozenset({"b"}), 1.0)).url == "a"


async def test_replicas_that_discovery_keeps_keep_their_load() -> None:
    engines = pool("a", "b")
    busy = await engines.acquire(None, frozenset({"b"}), 1.0)
    engines.set_endpoints(["a", "c"])
    assert engines.replicas["a"] is busy
    assert sorted(engines.replicas) == ["a", "c"]
    engines.set_endpoints(["c"])
    engines.release(busy)
    assert engines.in_flight == 0


async def test_a_new_replica_takes_the_waiting() -> None:
    engines = pool("a")
    await engines.acquire("s", NOBODY, 1.0)
    waiting = asyncio.create_task(engines.acquire("s", NOBODY, 60.0))
    await asyncio.sleep(0)
    engines.set_endpoints(["a", "b"])
    assert (await asyncio.wait_for(waiting, 5.0)).url == "b"


def test_speed_is_a_running_mean_of_observations() -> None:
    engines = pool("a", "b")
    engines.observe(1.0, 0.02)
    engines.observe(2.0, None)
    assert len(engines.ready) == 2
    assert engines.time_to_first_token_seconds == pytest.approx(1.1)
    assert engines.time_per_output_token_seconds == 0.02
