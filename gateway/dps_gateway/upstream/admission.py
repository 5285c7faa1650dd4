"""The queue of requests that wait for a replica of one pool or of either. It is bounded and fair, and has priorities.

Free replicas are assigned to queued requests as soon as they become free. A request that arrives later therefore never
takes a free replica from a queued one that could use it, and no wake-up is lost.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dps_gateway.upstream.fair_queue import DEFAULT_URGENCY, Entry, PriorityQueue
from dps_gateway.upstream.replica import Replica
from dps_gateway.worker_load import WorkerLoad


class PoolFull(Exception):
    """All replicas are busy, and the queue is full or the wait was too long."""


class PoolEmpty(Exception):
    """No replica that may serve the request is ready."""


class ReplicaPool(Protocol):
    """The interface of a pool of replicas that admission uses."""

    @property
    def name(self) -> str: ...

    def has_room(self, generates: bool) -> bool:
        """Whether a request would be sent without waiting. `generates` is described at `take`."""

    def usable(self, avoid: frozenset[str]) -> list[Replica]:
        """The replicas that may receive requests, except those whose URL is in `avoid`."""

    def take(
        self, session: str | None, avoid: frozenset[str], held: Mapping[str, int], generates: bool
    ) -> Replica | None:
        """Reserve a replica if one is free. `held` is described at `affinity.ranked`.

        generates: whether the request occupies the engine's scheduler.
        """

    def release(self, replica: Replica) -> None:
        """End a request on a replica."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A pool that may serve a request."""

    pool: ReplicaPool
    avoid: frozenset[str] = frozenset()
    """The URLs of replicas on which the request has failed."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request for a replica."""

    choices: Sequence[Choice]
    """The pools that may serve it, in order of preference."""
    session: str | None
    """The session whose preferred replica is selected. If None, the least loaded replica is selected."""
    tenant: str = ""
    urgency: int = DEFAULT_URGENCY
    """From 0 (served first) to 7, as in RFC 9218."""
    held: Mapping[str, int] = field(default_factory=dict)
    """The tokens of the prompt that a replica has in its own memory, by the replica's id."""
    generates: bool = True
    """Whether it occupies the engine's scheduler, whose limit of running requests then applies."""


Assignment = tuple[ReplicaPool, Replica]


@dataclass(eq=False, slots=True)
class _Waiter:
    """A queued request."""

    request: ReplicaRequest
    assignment: "asyncio.Future[Assignment | None]"
    """The replica that was assigned to the request, or None if no usable replica is left."""
    waits_until_ready: bool
    """Whether it waits while no usable replica is left."""


class Admission:
    """Admits requests to replicas. Pools that share it share its queue."""

    def __init__(self, max_queued: int, workers: WorkerLoad | None = None) -> None:
        """`max_queued` limits the queues of all `workers` together."""
        self.max_queued = max_queued
        self._workers = workers or WorkerLoad()
        self.holding = True
        """Whether requests may wait while no replica is ready."""
        self._waiting: PriorityQueue[_Waiter] = PriorityQueue()
        self._wanted: Counter[tuple[ReplicaPool, bool]] = Counter()
        """The number of queued requests that each pool may serve, for those that generate and those that do not."""
        self._preferred: Counter[ReplicaPool] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def preferring(self, pool: ReplicaPool) -> int:
        """The number of queued requests whose first choice is this pool."""
        return self._preferred[pool]

    async def acquire(
        self,
        request: ReplicaRequest,
        timeout_seconds: float,
        wake_seconds: float = 0.0,
        left_seconds: float = math.inf,
    ) -> Assignment:
        """A replica, which the caller must release. Waits in the queue while all are busy.

        `left_seconds` bounds both waits together.

        Raises PoolEmpty if none becomes ready within `wake_seconds`, and PoolFull if the queue is full or the wait for
        a busy one exceeds `timeout_seconds`. If the queue is full, a request of the lowest priority is removed, if the
        new request has a higher priority or its tenant has fewer queued requests. It is the newest request of the
        tenant with the most.
        """
        waits_until_ready = wake_seconds > 0
        if not _usable(request) and not (waits_until_ready and self.holding):
            raise _empty(request)
        if self._waiting:
            self.assign(only_free=True)  # another worker may have released a slot
        assignment = _take(request)
        if assignment is not None:
            return assignment
        waiter = _Waiter(request, asyncio.get_running_loop().create_future(), waits_until_ready)
        entry = Entry(request.tenant, request.session, waiter, request.urgency)
        assignment = await self._wait(entry, timeout_seconds, wake_seconds, left_seconds)
        if assignment is None:
            raise _empty(request)
        return assignment

    def assign(self, *, only_free: bool = False) -> None:
        """Assign free replicas to queued requests, and reject requests without a usable replica.

        With `only_free`, stop as soon as no queued request can use a pool that has room. This is sufficient if no
        replica has become unusable, because then no request has lost its last usable replica.
        """
        while self._assign_first(only_free):
            pass

    def _assign_first(self, only_free: bool) -> bool:
        """Assign a replica to the first request that can use one, or reject it. Returns whether there was one."""
        # The room is determined once for all requests, because it depends on the counts of the other workers.
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
                (waiter.waits_until_ready and self.holding) or _usable(waiter.request)
            ):
                continue
            self._leave(entry, served=assignment is not None)
            waiter.assignment.set_result(assignment)
            return True
        return False

    async def _wait(
        self, entry: Entry[_Waiter], timeout_seconds: float, wake_seconds: float, left_seconds: float
    ) -> Assignment | None:
        request, assignment = entry.item.request, entry.item.assignment
        ends = time.monotonic() + left_seconds
        self._join(entry)  # raises PoolFull
        try:
            if not _usable(request):
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
            if assigned and (taken := assignment.result()) is not None:
                pool, replica = taken
                pool.release(replica)
            raise
        finally:
            self._leave(entry)

    def _join(self, entry: Entry[_Waiter]) -> None:
        """Add a request to the queue. If the queue is full, remove another one in its favour, or raise PoolFull."""
        request, displaced = entry.item.request, None
        full = PoolFull(f"{_subject_and_verb(request)} full, and so is the queue")
        # First, so that two workers cannot both take the last place.
        self._workers.publish_queued(len(self._waiting) + 1)
        if len(self._waiting) + self._workers.queued_elsewhere >= self.max_queued:
            displaced = self._waiting.displaced_by(entry.tenant, entry.urgency)
            if displaced is None:
                self._workers.publish_queued(len(self._waiting))
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
        self._workers.publish_queued(len(self._waiting))
        request = entry.item.request
        self._preferred[request.choices[0].pool] += change
        for wanted in _wants(request):
            self._wanted[wanted] += change


def _wants(request: ReplicaRequest) -> Iterator[tuple[ReplicaPool, bool]]:
    """The pools that may serve a request, and whether it generates."""
    return ((choice.pool, request.generates) for choice in request.choices)


def _usable(request: ReplicaRequest) -> bool:
    return any(choice.pool.usable(choice.avoid) for choice in request.choices)


def _take(request: ReplicaRequest) -> Assignment | None:
    """Reserve a replica of the first pool in which one is free."""
    for choice in request.choices:
        replica = choice.pool.take(request.session, choice.avoid, request.held, request.generates)
        if replica is not None:
            return choice.pool, replica
    return None


def _subject_and_verb(request: ReplicaRequest) -> str:
    """The beginning of a message about the pools that may serve a request, such as "both pools were"."""
    if len(request.choices) > 1:
        return "both pools were"
    return f"the {request.choices[0].pool.name} pool was"


def _empty(request: ReplicaRequest, waited_seconds: float = 0.0) -> PoolEmpty:
    pool = "either" if len(request.choices) > 1 else f"the {request.choices[0].pool.name}"
    if waited_seconds:
        return PoolEmpty(f"no replica of {pool} pool became ready within {waited_seconds:g} s")
    return PoolEmpty(f"no replica of {pool} pool is ready")
