"""The queue that both pools share: which slot a waiting request takes, and its place by priority."""

import asyncio
import time

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from dps_gateway.api.request import urgency_of
from dps_gateway.auth import Key
from dps_gateway.pool import Pool
from dps_gateway.upstream.admission import Admission, Choice, PoolEmpty, PoolFull, ReplicaRequest
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.fair_queue import Entry, PriorityQueue
from dps_gateway.upstream.replica import Replica

Task = asyncio.Task[tuple[Pool, Replica]]


class SharedQueue:
    """Two pools with one slot each, and the queue for both."""

    def __init__(self, max_queued: int = 100) -> None:
        self.admission = Admission(max_queued)
        self.pools = {pool: EnginePool(pool, 1, self.admission) for pool in Pool}
        for pool, engines in self.pools.items():
            engines.set_endpoints([f"http://{pool}"])

    async def request(self, *pools: Pool, tenant: str = "", urgency: int = 3) -> Task:
        """A request that one of `pools` may serve. It has been admitted or queued."""
        choices = [Choice(self.pools[pool]) for pool in pools]

        async def acquired() -> tuple[Pool, Replica]:
            chosen, replica = await self.admission.acquire(
                ReplicaRequest(choices, None, tenant, urgency), 60.0
            )
            return Pool(chosen.name), replica

        task = asyncio.create_task(acquired())
        await asyncio.sleep(0)
        return task

    async def fill(self) -> None:
        for pool in Pool:
            await (await self.request(pool))

    def release(self, pool: Pool) -> None:
        (replica,) = self.pools[pool].replicas.values()
        self.pools[pool].release(replica)


async def test_preferred_pool_serves_a_request_unless_only_the_other_one_is_free() -> None:
    queue = SharedQueue()
    first = await (await queue.request(Pool.GREEDY, Pool.SPECULATIVE))
    second = await (await queue.request(Pool.GREEDY, Pool.SPECULATIVE))
    assert (first[0], second[0]) == (Pool.GREEDY, Pool.SPECULATIVE)


@pytest.mark.parametrize("freed", list(Pool))
async def test_waiting_request_takes_the_first_slot_of_either_pool(freed: Pool) -> None:
    queue = SharedQueue()
    await queue.fill()
    waiting = await queue.request(Pool.GREEDY, Pool.SPECULATIVE)
    assert [queue.pools[pool].queued for pool in (Pool.GREEDY, Pool.SPECULATIVE)] == [1, 0]
    queue.release(freed)
    assert (await waiting)[0] is freed
    assert len(queue.admission) == 0


async def test_request_of_a_fixed_pool_leaves_the_slots_of_the_other_one_to_later_requests() -> None:
    queue = SharedQueue()
    await queue.fill()
    fixed = await queue.request(Pool.GREEDY)
    either = await queue.request(Pool.GREEDY, Pool.SPECULATIVE)
    queue.release(Pool.SPECULATIVE)
    assert (await either)[0] is Pool.SPECULATIVE
    assert not fixed.done()
    queue.release(Pool.GREEDY)
    assert (await fixed)[0] is Pool.GREEDY


async def test_limit_of_the_queue_spans_both_pools() -> None:
    queue = SharedQueue(max_queued=2)
    await queue.fill()
    for pool in Pool:
        await queue.request(pool)
    with pytest.raises(PoolFull, match="both pools were full, and so is the queue"):
        await (await queue.request(Pool.GREEDY, Pool.SPECULATIVE))


async def test_request_fails_once_no_pool_that_may_serve_it_has_a_replica() -> None:
    queue = SharedQueue()
    await queue.fill()
    waiting = await queue.request(Pool.GREEDY, Pool.SPECULATIVE)
    for pool in Pool:
        assert not waiting.done()
        queue.pools[pool].set_endpoints([])
        await asyncio.sleep(0)
    with pytest.raises(PoolEmpty, match="no replica of either pool is ready"):
        await waiting


async def test_urgent_requests_are_served_first_and_displace_others() -> None:
    queue = SharedQueue(max_queued=2)
    await queue.fill()
    usual, low = await queue.request(Pool.GREEDY), await queue.request(Pool.GREEDY, urgency=5)
    urgent = await queue.request(Pool.GREEDY, urgency=0)
    with pytest.raises(PoolFull):
        await low
    queue.release(Pool.GREEDY)
    await urgent
    assert not usual.done()
    refused = [await queue.request(Pool.GREEDY, urgency=7) for _ in range(2)]
    with pytest.raises(PoolFull):
        await refused[1]
    queue.release(Pool.GREEDY)
    await usual


ENTRIES = st.lists(
    st.builds(Entry, st.sampled_from("ABC"), st.sampled_from(["1", None]), st.integers(), st.integers(0, 7))
)


@settings(deadline=None)
@given(ENTRIES, st.sampled_from("ABCD"), st.integers(0, 7))
def test_queue_is_in_order_of_urgency_and_displaces_only_the_lowest(
    entries: list[Entry[int]], tenant: str, urgency: int
) -> None:
    queue: PriorityQueue[int] = PriorityQueue()
    for entry in entries:
        queue.add(entry)
    order = [entry.urgency for entry in queue]
    assert order == sorted(entry.urgency for entry in entries)
    displaced = queue.displaced_by(tenant, urgency)
    assert displaced is None or urgency <= displaced.urgency == order[-1]
    assert displaced is not None or not order or urgency >= order[-1]
    while len(queue):
        assert queue.serve(next(iter(queue)))


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
    headers = CIMultiDict([("Priority", value) for value in sent])
    key = None if permitted is None else Key("team", b"digest", urgency=permitted)
    assert urgency_of(make_mocked_request("POST", "/", headers=headers), key) == urgency


async def test_waits_for_the_first_replica_and_for_a_free_one_have_one_time_limit_together() -> None:
    queue = SharedQueue()
    pool = queue.pools[Pool.GREEDY]
    pool.set_endpoints([])
    request, limit = ReplicaRequest([Choice(pool)], None), 0.5
    first, second = (asyncio.create_task(queue.admission.acquire(request, limit, limit, limit)) for _ in "12")
    await asyncio.sleep(0)
    started = time.monotonic()
    pool.set_endpoints(["http://first"])
    await first
    with pytest.raises(PoolFull, match="the greedy pool was busy"):
        await second
    assert time.monotonic() - started < 1.9 * limit
