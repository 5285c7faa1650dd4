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
from typing import TYPE_CHECKING, Self

from dps_gateway.pool import Pool
from dps_gateway.upstream.fair_queue import FairQueue, Queued
from dps_gateway.upstream.replica import Replica

if TYPE_CHECKING:
    from dps_gateway.upstream.engine_pool import EnginePool


class PoolFull(Exception):
    """All replicas are busy, and the queue is full or the wait was too long."""


class PoolEmpty(Exception):
    """No replica that may serve the request is ready."""


Accepts = Callable[["EnginePool", Replica], bool]
"""Whether a replica of a pool may serve a request."""


def any_replica(pool: "EnginePool", replica: Replica) -> bool:
    """Accepts every replica."""
    return True


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
class SlotRequest(Queued):
    """A request for a slot on a replica: the one that the session prefers or, without a session, the least loaded."""

    pools: Sequence["EnginePool"]
    """The pools that may serve it, in order of preference."""
    held: Mapping[str, int] = field(default_factory=dict)
    """The tokens of the prompt that a replica has in its own memory, by the replica's id."""
    generates: bool = True
    """Whether it occupies the engine's scheduler, whose limit of running requests then applies."""
    accepts: Accepts = any_replica
    """Which replicas of the pools may serve it."""
    chosen: Mapping[Pool, str] = field(default_factory=dict)
    """The ids of the replicas that were chosen for the routing decision. They are chosen again only after a wait, or if
    they are not free."""
    queue_seconds: float = math.inf
    """How long it waits while all replicas are busy."""
    wake_seconds: float = 0.0
    """How long it waits while no replica is left that may serve it; 0 if it does not."""
    left_seconds: float = math.inf
    """The limit of both waits together."""
    assignment: "asyncio.Future[Slot | None]" = field(init=False)
    """In the queue: the slot that is assigned to it, or None if no replica is left that may serve it."""

    @property
    def usable(self) -> bool:
        """Whether a replica may serve it now."""
        return any(pool.usable(self.accepts) for pool in self.pools)

    @property
    def promising(self) -> bool:
        """Whether a replica may serve it, or may do so soon."""
        return any(pool.promising(self.accepts) for pool in self.pools)

    def take(self) -> Slot | None:
        """A slot in the first pool in which one is free."""
        return next((slot for pool in self.pools if (slot := pool.take(self)) is not None), None)

    def wants(self) -> Iterator[tuple["EnginePool", bool]]:
        """The pools that may serve it, and whether it generates."""
        return ((pool, self.generates) for pool in self.pools)

    def full(self, reason: str) -> PoolFull:
        """The error if it does not receive a slot."""
        subject = "both pools were" if len(self.pools) > 1 else f"the {self.pools[0].name} pool was"
        return PoolFull(f"{subject} {reason}")

    def empty(self, waited_seconds: float = 0.0) -> PoolEmpty:
        """The error if there is no replica."""
        pool = "either" if len(self.pools) > 1 else f"the {self.pools[0].name}"
        reason = f"became ready within {waited_seconds:g} s" if waited_seconds else "is ready"
        return PoolEmpty(f"no replica of {pool} pool {reason}")


class Admission:
    """Admits requests to replicas. Pools that share it share its queue."""

    def __init__(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.holding = True
        """Whether requests may wait while no replica is ready."""
        self._waiting: FairQueue[SlotRequest] = FairQueue()
        self._wanted: Counter[tuple[EnginePool, bool]] = Counter()
        """The number of queued requests that each pool may serve, for those that generate and those that do not."""
        self.preferring: Counter[EnginePool] = Counter()
        """The number of queued requests whose first choice is each pool."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def acquire(self, request: SlotRequest) -> Slot:
        """A slot on a replica. Waits in the queue while all are busy.

        Raises PoolEmpty if none becomes ready within `wake_seconds`, or by the health check after a failed connection,
        and PoolFull if the queue is full or the wait for a busy one exceeds `queue_seconds`. If the queue is full, a
        request of the lowest priority is removed, if the new request has a higher priority or its tenant has fewer
        queued requests. It is the newest request of the tenant with the most.
        """
        slot = request.take()
        request.chosen = {}  # after a wait, another replica may be preferable
        if slot is None and self._may_wait(request):
            slot = await self._wait(request)
        if slot is None:
            raise request.empty()
        return slot

    def _may_wait(self, request: SlotRequest) -> bool:
        return request.promising or (self.holding and request.wake_seconds > 0)

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
        for request in self._waiting:
            if request.assignment.done():  # cancelled, and about to leave the queue
                continue
            slot = None if with_room.isdisjoint(request.wants()) else request.take()
            if slot is not None or not self._may_wait(request):
                self._leave(request, served=slot is not None)
                request.assignment.set_result(slot)
                return True
        return False

    async def _wait(self, request: SlotRequest) -> Slot | None:
        request.assignment = asyncio.get_running_loop().create_future()
        assignment = request.assignment
        ends = time.monotonic() + request.left_seconds
        self._join(request)  # raises PoolFull
        try:
            if request.wake_seconds and not request.usable:
                await asyncio.wait([assignment], timeout=request.wake_seconds)
                if not assignment.done() and not request.usable:
                    raise request.empty(request.wake_seconds)
            patience = min(request.queue_seconds, max(0.0, ends - time.monotonic()))
            await asyncio.wait([assignment], timeout=patience)
            if assignment.done():
                return assignment.result()
            if not request.usable:
                raise request.empty(request.queue_seconds)
            raise request.full(f"busy for {request.queue_seconds:g} s")
        except asyncio.CancelledError:
            assignment.cancel()
            assigned = not assignment.cancelled() and assignment.exception() is None
            if assigned and (slot := assignment.result()) is not None:
                slot.release()
            raise
        finally:
            self._leave(request)

    def _join(self, request: SlotRequest) -> None:
        """Add a request to the queue. If the queue is full, remove another one in its favour, or raise PoolFull."""
        displaced, full = None, request.full("full, and so is the queue")
        if len(self._waiting) >= self.max_queued:
            displaced = self._waiting.displaced_by(request.tenant, request.urgency)
            if displaced is None:
                raise full
        self._waiting.add(request)
        self._count(request, 1)
        if displaced is not None:
            self._leave(displaced)
            if not displaced.assignment.done():
                displaced.assignment.set_exception(full)

    def _leave(self, request: SlotRequest, *, served: bool = False) -> None:
        if self._waiting.remove(request, served=served):
            self._count(request, -1)

    def _count(self, request: SlotRequest, change: int) -> None:
        self.preferring[request.pools[0]] += change
        for wanted in request.wants():
            self._wanted[wanted] += change
