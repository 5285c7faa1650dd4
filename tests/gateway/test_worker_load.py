"""Limits that the workers of a gateway share: slots of engines, queues and memory for bodies."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.body_budget import BodyBudget
from dps_gateway.pool import Pool
from dps_gateway.shared_counts import SUFFIX, SharedCounts
from dps_gateway.upstream.admission import Admission, Choice, PoolFull, ReplicaRequest
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import Configuration, Replica
from dps_gateway.worker_load import TURN_SECONDS, WorkerLoad, equal_part

NOWHERE: frozenset[str] = frozenset()


class Worker:
    """A worker with one pool, whose only replica is `engine`."""

    def __init__(self, load: WorkerLoad, slots: int, max_queued: int = 100) -> None:
        self.admission = Admission(max_queued, load)
        self.pool = EnginePool(Pool.GREEDY, slots, self.admission, workers=load)
        self.pool.set_endpoints(["http://engine"])

    def take(self) -> Replica | None:
        return self.pool.take(None, NOWHERE)

    async def acquire(self) -> Replica:
        request = ReplicaRequest([Choice(self.pool)], None)
        _, replica = await self.admission.acquire(request, 10.0)
        return replica


@pytest.fixture
def loads(tmp_path: Path) -> Iterator[list[WorkerLoad]]:
    """The loads of two workers."""
    with ExitStack() as files:
        counts = [
            files.enter_context(closing(SharedCounts(tmp_path / f"{number}{SUFFIX}"))) for number in range(2)
        ]
        yield [WorkerLoad(each) for each in counts]


@pytest.mark.parametrize(
    ("limit", "workers", "expected"), [(8, 2, 4), (9, 2, 4), (1, 4, 1), (0, 4, 0)], ids=str
)
def test_equal_part_is_at_least_one_of_a_limit_above_zero(limit: int, workers: int, expected: int) -> None:
    assert equal_part(limit, workers) == expected


async def test_one_worker_may_use_all_slots_of_an_engine(loads: Sequence[WorkerLoad]) -> None:
    one, other = (Worker(load, slots=4) for load in loads)
    taken = [one.take() for _ in range(4)]
    assert None not in taken
    assert (one.take(), other.take()) == (None, None)
    one.pool.release(one.pool.replicas["http://engine"])
    assert other.take() is not None
    assert (one.take(), other.take()) == (None, None)


async def test_released_slot_goes_to_the_worker_that_has_less_than_its_part(
    loads: Sequence[WorkerLoad],
) -> None:
    one, other = (Worker(load, slots=2) for load in loads)
    for _ in range(2):
        one.take()
    queued = [asyncio.create_task(worker.acquire()) for worker in (one, other)]
    await asyncio.sleep(0)
    one.pool.release(one.pool.replicas["http://engine"])
    other.admission.assign(only_free=True)  # which a worker does every few milliseconds
    assert await queued[1]
    assert not queued[0].done()
    one.pool.release(one.pool.replicas["http://engine"])
    assert await queued[0]


@asynccontextmanager
async def busy_workers(
    number: int, slots: int, idle: int = 0, clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[dict[Worker, list[asyncio.Task[Replica]]]]:
    """Workers that have each received 20 requests at the same moment, beside others that have received none."""
    with TemporaryDirectory() as folder, ExitStack() as files:
        paths = [Path(folder) / f"{each}{SUFFIX}" for each in range(number + idle)]
        counts = [files.enter_context(closing(SharedCounts(path))) for path in paths]
        workers = [Worker(WorkerLoad(each, clock), slots) for each in counts[:number]]
        requests = {worker: [asyncio.create_task(worker.acquire()) for _ in range(20)] for worker in workers}
        await asyncio.sleep(0)
        try:
            yield requests
        finally:
            tasks = [task for each in requests.values() for task in each]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def answer(worker: Worker) -> None:
    """End the requests that this worker has in flight, and let it assign free slots as it does periodically."""
    for _ in range(worker.pool.in_flight):
        worker.pool.release(worker.pool.replicas["http://engine"])
    worker.admission.assign(only_free=True)


async def test_workers_with_queued_requests_use_all_slots() -> None:
    async with busy_workers(2, slots=5, idle=2) as requests:
        for worker in (*requests, *requests):
            answer(worker)
        assert sum(worker.pool.in_flight for worker in requests) == 5


async def test_workers_take_turns_if_there_are_fewer_slots_than_workers() -> None:
    now = 0.0
    async with busy_workers(3, slots=1, clock=lambda: now) as requests:
        for _ in range(30):  # 15 turns
            now += TURN_SECONDS / 2
            for worker in requests:
                answer(worker)
            await asyncio.sleep(0)
        served = [sum(task.done() for task in tasks) for tasks in requests.values()]
    assert min(served) >= 5


class CountedLoad(WorkerLoad):
    """Counts how often the slots of a replica are determined, which reads the counts of all workers."""

    determined = 0

    def slots(self, pool: str, replica_id: str, limit: int) -> int:
        self.determined += 1
        return super().slots(pool, replica_id, limit)


@pytest.mark.parametrize("check", [EnginePool.mark_available, EnginePool.mark_unavailable])
async def test_health_check_determines_slots_once_for_the_whole_queue(
    check: Callable[[EnginePool, Replica], None],
) -> None:
    load = CountedLoad()
    worker = Worker(load, slots=1)
    worker.pool.set_endpoints(["http://engine", "http://other"])
    while worker.take():
        pass
    queued = [asyncio.create_task(worker.acquire()) for _ in range(50)]
    await asyncio.sleep(0)
    load.determined = 0
    check(worker.pool, worker.pool.replicas["http://other"])
    assert load.determined <= 2
    for task in queued:
        task.cancel()


async def test_slots_beyond_the_scheduler_are_assigned_to_requests_that_do_not_generate() -> None:
    worker = Worker(WorkerLoad(), slots=2)
    engine = worker.pool.replicas["http://engine"]
    worker.pool.record_configuration(engine, Configuration(max_running=1))
    worker.take()
    worker.pool.take(None, NOWHERE, generates=False)
    request = ReplicaRequest([Choice(worker.pool)], None, generates=False)
    queued = asyncio.create_task(worker.admission.acquire(request, 10.0))
    await asyncio.sleep(0)
    worker.pool.release(engine)
    assert await asyncio.wait_for(queued, 1.0) == (worker.pool, engine)


async def test_newcomer_does_not_take_a_slot_of_another_worker_before_queued_requests(
    loads: Sequence[WorkerLoad],
) -> None:
    one, other = (Worker(load, slots=1) for load in loads)
    other.take()
    queued = asyncio.create_task(one.acquire())
    await asyncio.sleep(0)
    other.pool.release(other.pool.replicas["http://engine"])
    newcomer = asyncio.create_task(one.acquire())
    await asyncio.wait([queued, newcomer], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    assert (queued.done(), newcomer.done()) == (True, False)
    newcomer.cancel()


async def test_queues_of_all_workers_have_one_limit(loads: Sequence[WorkerLoad]) -> None:
    one, other = (Worker(load, slots=1, max_queued=2) for load in loads)
    one.take()
    queued = [asyncio.create_task(worker.acquire()) for worker in (one, other)]
    await asyncio.sleep(0)
    with pytest.raises(PoolFull, match="and so is the queue"):
        await one.acquire()
    queued.pop().cancel()
    await asyncio.sleep(0)
    third = asyncio.create_task(one.acquire())
    await asyncio.sleep(0)
    assert not third.done()
    for task in (*queued, third):
        task.cancel()


async def test_workers_that_queue_a_request_at_the_same_moment_do_not_exceed_the_limit(
    loads: Sequence[WorkerLoad],
) -> None:
    one, other = (Worker(load, slots=1, max_queued=1) for load in loads)
    one.take()
    later = other.acquire()

    class OtherActsFirst(WorkerLoad):
        """Reads the other worker's queue just before the other one receives a request."""

        @property
        def queued_elsewhere(self) -> int:
            queued = loads[0].queued_elsewhere
            with suppress(PoolFull):
                later.send(None)
            return queued

        def publish_queued(self, requests: int) -> None:
            loads[0].publish_queued(requests)

    one.admission._workers = OtherActsFirst()
    with closing(later):
        queued = asyncio.create_task(one.acquire())
        await asyncio.sleep(0)
        assert len(one.admission) + len(other.admission) == 1
        queued.cancel()


def test_bodies_of_all_workers_have_one_limit(loads: Sequence[WorkerLoad]) -> None:
    one, other = (BodyBudget(lambda: 100, lambda: None, load) for load in loads)
    assert one.reserve("", 60)
    assert not other.reserve("", 41)
    assert other.reserve("", 40)
    one.release("", 60)
    assert other.reserve("", 60)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=60))
def test_workers_together_never_exceed_the_slots_of_an_engine(steps: Sequence[tuple[bool, int]]) -> None:
    with TemporaryDirectory() as folder, ExitStack() as files:
        workers = []
        for number in range(3):
            counts = files.enter_context(closing(SharedCounts(Path(folder) / f"{number}{SUFFIX}")))
            workers.append(Worker(WorkerLoad(counts), slots=5))
        for begins, number in steps:
            worker = workers[number]
            if begins:
                worker.take()
            elif worker.pool.in_flight:
                worker.pool.release(worker.pool.replicas["http://engine"])
            assert sum(each.pool.in_flight for each in workers) <= 5
