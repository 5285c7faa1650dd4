"""The queue that both pools share: which slot a waiting request takes, its place by priority, and empty pools."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.api.call import urgency_of
from dps_gateway.auth import Key
from dps_gateway.pool import Pool
from dps_gateway.upstream.admission import PoolEmpty, PoolFull, SlotRequest
from tests.gateway.engine_pool import LONG_SECONDS, PoolPair

BOTH = (Pool.GREEDY, Pool.SPECULATIVE)


def idle_pair(max_queued: int = 100) -> PoolPair:
    """Two pools with one free slot each."""
    pair = PoolPair(max_queued)
    pair.start(*Pool)
    return pair


async def busy_pair(max_queued: int = 100) -> PoolPair:
    """Two pools whose slots are taken."""
    pair = idle_pair(max_queued)
    for pool in Pool:
        await (await pair.request(pool))
    return pair


async def test_preferred_pool_serves_a_request_unless_only_the_other_one_is_free() -> None:
    pair = idle_pair()
    first = await (await pair.request(*BOTH))
    second = await (await pair.request(*BOTH))
    assert (first, second) == BOTH


@pytest.mark.parametrize("freed", list(Pool))
async def test_waiting_request_takes_the_first_slot_of_either_pool(freed: Pool) -> None:
    pair = await busy_pair()
    waiting = await pair.request(*BOTH)
    assert [pair.pools[pool].queued for pool in BOTH] == [1, 0]
    pair.release(freed)
    assert await waiting is freed
    assert len(pair.admission) == 0


async def test_limit_of_the_queue_spans_both_pools() -> None:
    pair = await busy_pair(max_queued=2)
    for pool in Pool:
        await pair.request(pool)
    with pytest.raises(PoolFull, match="both pools were full, and so is the queue"):
        await (await pair.request(*BOTH))


async def test_request_fails_once_no_pool_that_may_serve_it_has_a_replica() -> None:
    pair = await busy_pair()
    waiting = await pair.request(*BOTH)
    for pool in Pool:
        assert not waiting.done()
        pair.pools[pool].set_endpoints([])
        await asyncio.sleep(0)
    with pytest.raises(PoolEmpty, match="no replica of either pool is ready"):
        await waiting


async def test_urgent_requests_are_served_first_and_displace_others() -> None:
    pair = await busy_pair(max_queued=2)
    usual, low = await pair.request(Pool.GREEDY), await pair.request(Pool.GREEDY, urgency=5)
    urgent = await pair.request(Pool.GREEDY, urgency=0)
    with pytest.raises(PoolFull):
        await low
    pair.release(Pool.GREEDY)
    await urgent
    assert not usual.done()
    refused = [await pair.request(Pool.GREEDY, urgency=7) for _ in range(2)]
    with pytest.raises(PoolFull):
        await refused[1]
    pair.release(Pool.GREEDY)
    await usual


@pytest.mark.parametrize(
    ("sent", "permitted", "urgency"),
    [
        ([], None, 3),
        (["u=0"], None, 3),
        (["u=6"], None, 6),
        (["u=0"], 1, 1),
        (["u=2, i"], 0, 2),
        (["i", "u=5;x=1"], 0, 5),
        (["u=1, u=4"], 0, 4),
        (["u=9"], 0, 3),
        (["u=-1"], 0, 3),
        (["urgent"], 0, 3),
    ],
)
def test_urgency_is_that_of_the_header_as_far_as_the_key_permits(
    sent: list[str], permitted: int | None, urgency: int
) -> None:
    assert urgency_of(sent, Key("tenant", b"", urgency=permitted)) == urgency


async def test_waits_for_the_first_replica_and_for_a_free_one_have_one_time_limit_together() -> None:
    pair = idle_pair()
    pool = pair.pools[Pool.GREEDY]
    pool.set_endpoints([])
    limit = 0.5
    first, second = (
        asyncio.create_task(
            pair.admission.acquire(
                SlotRequest([pool], queue_seconds=limit, wake_seconds=limit, left_seconds=limit)
            )
        )
        for _ in "12"
    )
    await asyncio.sleep(0)
    started = time.monotonic()
    pool.set_endpoints(["http://first"])
    await first
    with pytest.raises(PoolFull, match="the greedy pool was busy"):
        await second
    assert time.monotonic() - started < 1.9 * limit


async def test_request_is_refused_if_no_replica_becomes_ready_in_time() -> None:
    pair = PoolPair()
    waiting = await pair.request(*BOTH, wake_seconds=0.01)
    with pytest.raises(PoolEmpty, match=r"no replica of either pool became ready within 0\.01 s"):
        await waiting
    assert len(pair.admission) == 0


events = st.tuples(st.sampled_from(["request", "wake", "sleep", "release", "cancel"]), st.sampled_from(Pool))


@given(st.lists(events, max_size=40))
def test_no_request_is_refused_or_lost_whatever_happens_to_the_pools(events: list[tuple[str, Pool]]) -> None:
    async def run() -> None:
        pair, tasks = PoolPair(slots=2), []
        cancelled = 0
        for kind, pool in events:
            engines = pair.pools[pool]
            match kind:
                case "request":
                    tasks.append(await pair.request(pool, pool.other, wake_seconds=LONG_SECONDS))
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
