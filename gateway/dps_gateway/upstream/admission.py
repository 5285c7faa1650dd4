"""The queue of requests that wait for a replica of one pool or of either. It is bounded and fair, and has priorities.

Free replicas are assigned to queued requests as soon as they become free. A request that arrives later therefore never
takes a free replica from a queued one that could use it, and no wake-up is lost.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

from dps_gateway.pool import Pool
from dps_gateway.upstream.fair_queue import DEFAULT_URGENCY, Entry, FairQueue
from dps_gateway.upstream.replica import Replica

if TYPE_CHECKING:
    from dps_gateway.upstream.engine_pool import EnginePool


NOT_CHOSEN: Final[Mapping[Pool, str]] = MappingProxyType({})


class PoolFull(Exception):
    """All replicas are busy, and the queue is full or the wait was too long."""


class PoolEmpty(Exception):
    """No replica that may serve the request is ready."""


Accepts = Callable[["EnginePool", Replica], bool]
"""Whether a replica of a pool may serve a request."""


def any_replica(pool: "EnginePool", replica: Replica) -> bool:
    """Accepts every replica."""
    return True


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A request for a slot on a replica."""

    pools: Sequence["EnginePool"]
    """The pools that may serve it, in order of preference."""
    session: str | None = None
    """The session whose preferred replica is selected. If None, the least loaded replica is selected."""
    tenant: str = ""
    urgency: int = DEFAULT_URGENCY
    """From 0 (served first) to 7, as in RFC 9218."""
    held: Mapping[str, int] = field(default_factory=dict)
    """The tokens of the prompt that a replica has in its own memory, by the replica's id."""
    generates: bool = True
    """Whether it occupies the engine's scheduler, whose limit of running requests then applies."""
    accepts: Accepts = any_replica
    """Which replicas of the pools may serve it."""


@dataclass(eq=False, slots=True)
class Slot:
    """A place for one request on a replica. Whoever acquired it releases it when the request has ended."""

    pool: "EnginePool"
    replica: Replica
    _released: bool = False

    def release(self) -> None:
        """Assign the slot to the next request in the queue. Has no effect the second time."""
        if not self._released:
            self._released = True
            self.pool.release(self.replica)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


@dataclass(eq=False, slots=True)
class _Waiter:
    """A queued request."""

    request: SlotRequest
    assignment: "asyncio.Future[Slot | None]"
    """The slot that was assigned to the request, or None if no replica is left that may serve it."""
    waits_until_ready: bool
    """Whether it waits while no replica is left that may serve it."""


class Admission:
    """Admits requests to replicas. Pools that share it share its queue."""

    def __init__(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.holding = True
        """Whether requests may wait while no replica is ready."""
        self._waiting: FairQueue[_Waiter] = FairQueue()
        self._wanted: Counter[tuple[EnginePool, bool]] = Counter()
        """The number of queued requests that each pool may serve, for those that generate and those that do not."""
        self.preferring: Counter[EnginePool] = Counter()
        """The number of queued requests whose first choice is each pool."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def acquire(
        self,
        request: SlotRequest,
        timeout_seconds: float,
        wake_seconds: float = 0.0,
        left_seconds: float = math.inf,
        chosen: Mapping[Pool, str] = NOT_CHOSEN,
    ) -> Slot:
        """A slot on a replica. Waits in the queue while all are busy.

        `left_seconds` bounds both waits together. `chosen` are the ids of the replicas that have just been chosen in
        each pool, which are used if the request need not wait.

        Raises PoolEmpty if none becomes ready within `wake_seconds`, or by the health check after a failed connection,
        and PoolFull if the queue is full or the wait for a busy one exceeds `timeout_seconds`. If the queue is full, a
        request of the lowest priority is removed, if the new request has a higher priority or its tenant has fewer
        queued requests. It is the newest request of the tenant with the most.
        """
        slot = _take(request, chosen)
        if slot is not None:
            return slot
        waits_until_ready = wake_seconds > 0
        if not _promising(request) and not (waits_until_ready and self.holding):
            raise _empty(request)
        waiter = _Waiter(request, asyncio.get_running_loop().create_future(), waits_until_ready)
        entry = Entry(request.tenant, request.session, waiter, request.urgency)
        slot = await self._wait(entry, timeout_seconds, wake_seconds, left_seconds)
        if slot is None:
            raise _empty(request)
        return slot

    def assign(self, *, only_free: bool = False) -> None:
        """Assign free replicas to queued requests, and reject those that no replica may serve.

        With `only_free`, stop as soon as no queued request can use a pool that has room. This is sufficient if no
        replica has become unusable, because then no request has lost its last one.
        """
        while self._assign_first(only_free):
            pass

    def _assign_first(self, only_free: bool) -> bool:
        """Assign a replica to the first request that can use one, or reject it. Returns whether there was one."""
        with_room = {
            (pool, generates)
            for (pool, generates), count in self._wanted.items()
            if count and pool.has_room(generates)
        }
        if only_free and not with_room:
            return False
        for entry in self._waiting:
            waiter = entry.item
            if waiter.assignment.done():  # cancelled, and about to leave the queue
                continue
            assignment = None if with_room.isdisjoint(_wants(waiter.request)) else _take(waiter.request)
            if assignment is None and (
                (waiter.waits_until_ready and self.holding) or _promising(waiter.request)
            ):
                continue
            self._leave(entry, served=assignment is not None)
            waiter.assignment.set_result(assignment)
            return True
        return False

    async def _wait(
        self, entry: Entry[_Waiter], timeout_seconds: float, wake_seconds: float, left_seconds: float
    ) -> Slot | None:
        request, assignment = entry.item.request, entry.item.assignment
        ends = time.monotonic() + left_seconds
        self._join(entry)  # raises PoolFull
        try:
            if wake_seconds and not _usable(request):
                await asyncio.wait([assignment], timeout=wake_seconds)
                if not assignment.done() and not _usable(request):
                    raise _empty(request, wake_seconds)
            patience = min(timeout_seconds, max(0.0, ends - time.monotonic()))
            await asyncio.wait([assignment], timeout=patience)
            if assignment.done():
                return assignment.result()
            if not _usable(request):
                raise _empty(request, timeout_seconds)
            raise PoolFull(f"{_subject_and_verb(request)} busy for {timeout_seconds:g} s")
        except asyncio.CancelledError:
            assignment.cancel()
            assigned = not assignment.cancelled() and assignment.exception() is None
            if assigned and (slot := assignment.result()) is not None:
                slot.release()
            raise
        finally:
            self._leave(entry)

    def _join(self, entry: Entry[_Waiter]) -> None:
        """Add a request to the queue. If the queue is full, remove another one in its favour, or raise PoolFull."""
        request, displaced = entry.item.request, None
        full = PoolFull(f"{_subject_and_verb(request)} full, and so is the queue")
        if len(self._waiting) >= self.max_queued:
            displaced = self._waiting.displaced_by(entry.tenant, entry.urgency)
            if displaced is None:
                raise full
        self._waiting.add(entry)
        self._count(entry, 1)
        if displaced is not None:
            self._leave(displaced)
            if not displaced.item.assignment.done():
                displaced.item.assignment.set_exception(full)

    def _leave(self, entry: Entry[_Waiter], *, served: bool = False) -> None:
        if self._waiting.serve(entry) if served else self._waiting.remove(entry):
            self._count(entry, -1)

    def _count(self, entry: Entry[_Waiter], change: int) -> None:
        request = entry.item.request
        self.preferring[request.pools[0]] += change
        for wanted in _wants(request):
            self._wanted[wanted] += change


def _wants(request: SlotRequest) -> Iterator[tuple["EnginePool", bool]]:
    """The pools that may serve a request, and whether it generates."""
    return ((pool, request.generates) for pool in request.pools)


def _promising(request: SlotRequest) -> bool:
    return any(pool.promising(request.accepts) for pool in request.pools)


def _usable(request: SlotRequest) -> bool:
    return any(pool.usable(request.accepts) for pool in request.pools)


def _take(request: SlotRequest, chosen: Mapping[Pool, str] = NOT_CHOSEN) -> Slot | None:
    """A slot in the first pool in which one is free."""
    for pool in request.pools:
        slot = pool.take(request, chosen.get(pool.name))
        if slot is not None:
            return slot
    return None


def _subject_and_verb(request: SlotRequest) -> str:
    """The beginning of a message about the pools that may serve a request, such as "both pools were"."""
    if len(request.pools) > 1:
        return "both pools were"
    return f"the {request.pools[0].name} pool was"


def _empty(request: SlotRequest, waited_seconds: float = 0.0) -> PoolEmpty:
    pool = "either" if len(request.pools) > 1 else f"the {request.pools[0].name}"
    if waited_seconds:
        return PoolEmpty(f"no replica of {pool} pool became ready within {waited_seconds:g} s")
    return PoolEmpty(f"no replica of {pool} pool is ready")
