"""Requests that wait while no replica of either pool is ready, because both pools are scaled to zero."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.upstream.admission import Admission, Choice, PoolEmpty, PoolFull, ReplicaRequest
from dps_gateway.upstream.engine_pool import EnginePool

BOTH = (Pool.GREEDY, Pool.SPECULATIVE)
ENGINE = "http://engine"
LONG = 60.0
Task = asyncio.Task[Pool]


class SharedQueue:
    """Two pools without a replica, and the queue for both."""

    def __init__(self, max_queued: int = 100, max_in_flight: int = 1) -> None:
        self.admission = Admission(max_queued)
        self.pools = {pool: EnginePool(pool, max_in_flight, self.admission) for pool in Pool}

    async def request(
        self, pools: Sequence[Pool] = BOTH, *, wake_seconds: float = LONG, timeout_seconds: float = LONG
    ) -> Task:
        """A request that one of `pools` may serve. It has been admitted, queued or refused."""
        choices = [Choice(self.pools[pool]) for pool in pools]

        async def acquired() -> Pool:
            request = ReplicaRequest(choices, None)
            chosen, _ = await self.admission.acquire(request, timeout_seconds, wake_seconds)
            return Pool(chosen.name)

        task = asyncio.create_task(acquired())
        await asyncio.sleep(0)
        return task

    def wake(self, pool: Pool) -> None:
        self.pools[pool].set_endpoints([f"{ENGINE}-{pool}"])

    def release(self, pool: Pool) -> None:
        (replica,) = self.pools[pool].replicas.values()
        self.pools[pool].release(replica)


@pytest.mark.parametrize("woken", list(Pool))
async def test_request_waits_for_the_first_replica_of_either_pool(woken: Pool) -> None:
    queue = SharedQueue()
    waiting = await queue.request()
    assert [queue.pools[pool].queued for pool in BOTH] == [1, 0]
    queue.wake(woken)
    assert await waiting is woken
    assert len(queue.admission) == 0


async def test_request_is_refused_at_once_without_time_to_wait() -> None:
    queue = SharedQueue()
    with pytest.raises(PoolEmpty, match="no replica of either pool is ready"):
        await (await queue.request(wake_seconds=0))


async def test_request_is_refused_if_no_replica_becomes_ready_in_time() -> None:
    queue = SharedQueue()
    waiting = await queue.request(wake_seconds=0.01)
    with pytest.raises(PoolEmpty, match=r"no replica of either pool became ready within 0\.01 s"):
        await waiting
    assert len(queue.admission) == 0


async def test_time_for_a_busy_replica_begins_when_the_pool_is_awake() -> None:
    queue = SharedQueue()
    served, waiting = await queue.request(), await queue.request(wake_seconds=0.01)
    queue.wake(Pool.GREEDY)
    await served
    await asyncio.sleep(0.03)
    assert not waiting.done()
    queue.release(Pool.GREEDY)
    assert await waiting is Pool.GREEDY


async def test_replica_that_stays_busy_is_reported_as_full() -> None:
    queue = SharedQueue()
    served = await queue.request()
    waiting = await queue.request(wake_seconds=0.01, timeout_seconds=0.01)
    queue.wake(Pool.GREEDY)
    await served
    with pytest.raises(PoolFull, match="both pools were busy"):
        await waiting


async def test_queue_of_waiting_requests_is_bounded() -> None:
    queue = SharedQueue(max_queued=2)
    held = [await queue.request() for _ in range(2)]
    with pytest.raises(PoolFull):
        await (await queue.request())
    queue.wake(Pool.GREEDY)
    queue.wake(Pool.SPECULATIVE)
    assert {await each for each in held} == set(Pool)


async def test_waiting_requests_are_refused_when_holding_ends() -> None:
    queue = SharedQueue()
    waiting = await queue.request()
    queue.admission.holding = False
    queue.admission.assign()
    with pytest.raises(PoolEmpty):
        await waiting
    with pytest.raises(PoolEmpty):
        await (await queue.request())


async def test_cancelled_request_keeps_no_slot() -> None:
    queue = SharedQueue()
    abandoned, waiting = await queue.request(), await queue.request()
    queue.wake(Pool.GREEDY)
    abandoned.cancel()
    assert await waiting is Pool.GREEDY
    assert (queue.pools[Pool.GREEDY].in_flight, len(queue.admission)) == (1, 0)


@st.composite
def wakes(draw: st.DrawFn) -> list[tuple[str, Pool]]:
    events = st.tuples(
        st.sampled_from(["request", "wake", "sleep", "release", "cancel"]), st.sampled_from(Pool)
    )
    return draw(st.lists(events, max_size=40))


@settings(deadline=None)
@given(wakes())
def test_no_request_is_refused_or_lost_whatever_happens_to_the_pools(events: list[tuple[str, Pool]]) -> None:
    async def run() -> None:
        queue, tasks = SharedQueue(max_in_flight=2), []
        cancelled = 0
        for kind, pool in events:
            engines = queue.pools[pool]
            match kind:
                case "request":
                    tasks.append(await queue.request((pool, pool.other)))
                case "wake":
                    queue.wake(pool)
                case "sleep" if engines.in_flight == 0:  # as the operator does: only an idle pool
                    engines.set_endpoints([])
                case "release" if engines.in_flight:
                    queue.release(pool)
                case "cancel" if waiting := [task for task in tasks if not task.done()]:
                    waiting[0].cancel()
                    cancelled += 1
            await asyncio.sleep(0)
            assert sum(each.in_flight for each in queue.pools.values()) <= 4
        for pool in Pool:
            queue.wake(pool)
        while len(queue.admission):
            for pool in Pool:
                if queue.pools[pool].in_flight:
                    queue.release(pool)
            await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [each for each in results if not isinstance(each, Pool)]
        assert all(isinstance(each, asyncio.CancelledError) for each in failures)
        assert len(failures) <= cancelled

    asyncio.run(run())
