"""Requests that wait while no replica of either pool is ready, because both pools are scaled to zero."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.upstream.admission import PoolEmpty
from tests.gateway.engine_pool import LONG_SECONDS, PoolPair

BOTH = (Pool.GREEDY, Pool.SPECULATIVE)


async def request(
    pair: PoolPair,
    pools: Sequence[Pool] = BOTH,
    *,
    wake_seconds: float = LONG_SECONDS,
    timeout_seconds: float = LONG_SECONDS,
) -> asyncio.Task[Pool]:
    """A request that one of `pools` may serve, and that waits for its first replica."""
    return await pair.request(*pools, wake_seconds=wake_seconds, timeout_seconds=timeout_seconds)


async def test_request_is_refused_if_no_replica_becomes_ready_in_time() -> None:
    pair = PoolPair()
    waiting = await request(pair, wake_seconds=0.01)
    with pytest.raises(PoolEmpty, match=r"no replica of either pool became ready within 0\.01 s"):
        await waiting
    assert len(pair.admission) == 0


@st.composite
def wakes(draw: st.DrawFn) -> list[tuple[str, Pool]]:
    events = st.tuples(
        st.sampled_from(["request", "wake", "sleep", "release", "cancel"]), st.sampled_from(Pool)
    )
    return draw(st.lists(events, max_size=40))


@given(wakes())
def test_no_request_is_refused_or_lost_whatever_happens_to_the_pools(events: list[tuple[str, Pool]]) -> None:
    async def run() -> None:
        pair, tasks = PoolPair(slots=2), []
        cancelled = 0
        for kind, pool in events:
            engines = pair.pools[pool]
            match kind:
                case "request":
                    tasks.append(await request(pair, (pool, pool.other)))
                case "wake":
                    pair.start(pool)
                case "sleep" if engines.in_flight == 0:  # as the operator does: only an idle pool
                    engines.set_endpoints([])
                case "release" if engines.in_flight:
                    pair.release(pool)
                case "cancel" if waiting := [task for task in tasks if not task.done()]:
                    waiting[0].cancel()
                    cancelled += 1
            await asyncio.sleep(0)
            assert sum(each.in_flight for each in pair.pools.values()) <= 4
        pair.start(*Pool)
        while len(pair.admission):
            for pool in Pool:
                if pair.pools[pool].in_flight:
                    pair.release(pool)
            await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [each for each in results if not isinstance(each, Pool)]
        assert all(isinstance(each, asyncio.CancelledError) for each in failures)
        assert len(failures) <= cancelled

    asyncio.run(run())
