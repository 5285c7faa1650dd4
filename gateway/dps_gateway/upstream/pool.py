"""One pool of engine replicas: their readiness, their load, and the queue of requests for them."""

import asyncio
import logging
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import PoolView
from dps_gateway.upstream.affinity import LOAD_FACTOR, preferred
from dps_gateway.upstream.fair_queue import Entry, FairQueue
from dps_gateway.upstream.replica import SLOW_START_SECONDS, Replica

log = logging.getLogger(__name__)

SMOOTHING: Final = 0.1
"""Weight of the newest observation in the pool's running means."""

MAX_EJECTED_FRACTION: Final = 0.5
"""The maximum fraction of a pool's replicas that is ejected at the same time. If most replicas return errors, the cause
is probably the requests or the load, and fewer replicas would not help."""


class PoolFull(Exception):
    """All replicas are busy, and the queue is full or the wait was too long."""


class PoolEmpty(Exception):
    """No replica of the pool is ready."""


@dataclass(eq=False, slots=True)
class _Waiter:
    """A queued request."""

    affinity: str | None
    avoid: frozenset[str]
    place: "asyncio.Future[Replica | None]"
    """The replica that was assigned to the request, or None if no usable replica is left."""


class EnginePool:
    """The replicas of one pool, and this process's observations of them.

    Free replicas are assigned to queued requests as soon as they become free, in the order of a `FairQueue`. A request
    that arrives later therefore never takes a free replica from a queued one, and no wake-up is lost.
    """

    def __init__(
        self,
        name: Pool,
        max_in_flight_per_replica: int,
        max_queued: int,
        api_key: str | None = None,
        trust: ssl.SSLContext | bool = True,
    ) -> None:
        self.name = name
        self.max_in_flight_per_replica = max_in_flight_per_replica
        self.max_queued = max_queued
        self.api_key = api_key
        self.trust = trust
        """The `ssl` argument of requests to https:// replicas."""
        self.replicas: dict[str, Replica] = {}
        self.time_to_first_token_seconds: float | None = None
        """Running mean of the time to first token of recent streamed answers; None before the first answer."""
        self.time_per_output_token_seconds: float | None = None
        """Running mean of the time per output token of recent streamed answers; None before the first answer."""
        self._waiting: FairQueue[_Waiter] = FairQueue()

    def configure(
        self,
        max_in_flight_per_replica: int,
        max_queued: int,
        api_key: str | None,
        trust: ssl.SSLContext | bool = True,
    ) -> None:
        """Apply new limits, a new API key and new trusted authorities. Requests in flight are unaffected."""
        self.max_in_flight_per_replica = max_in_flight_per_replica
        self.max_queued = max_queued
        self.api_key = api_key
        self.trust = trust
        self._assign()

    def set_endpoints(self, urls: Iterable[str]) -> None:
        """Set the replicas' base URLs. Requests on a removed replica are finished there."""
        self.replicas = {url: self.replicas.get(url) or Replica(url) for url in urls}
        self._assign()

    @property
    def ready(self) -> list[Replica]:
        """The replicas that may receive requests."""
        return [replica for replica in self.replicas.values() if replica.ready]

    @property
    def in_flight(self) -> int:
        """Requests in flight on all replicas."""
        return sum(replica.in_flight for replica in self.replicas.values())

    @property
    def queued(self) -> int:
        """Requests that wait for a free replica."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a request would be sent without waiting."""
        return any(replica.accepts(self.max_in_flight_per_replica) for replica in self.replicas.values())

    def view(self, session: str | None, uncached_tokens: int, fetchable_tokens: int) -> PoolView | None:
        """The pool's state for one turn: the load of the replica that would serve it. None if no replica is ready."""
        ready = self.ready
        if not ready:
            return None
        limit = self.max_in_flight_per_replica
        replica = preferred(session, ready, limit) or min(ready, key=lambda each: each.in_flight)
        others = replica.others
        return PoolView(
            ready_replicas=len(ready),
            in_flight=replica.in_flight + others.running,
            queued=others.waiting + self.queued / len(ready),
            queued_prefill_tokens=replica.prefill_tokens + others.waiting_tokens,
            running_limit=replica.limit,
            uncached_tokens=uncached_tokens,
            fetchable_tokens=fetchable_tokens,
        )

    async def acquire(
        self, session: str | None, avoid: frozenset[str], timeout_seconds: float, tenant: str = ""
    ) -> Replica:
        """A replica for one request, which the caller must `release`. Waits in the queue while all are busy.

        `avoid` contains the URLs of replicas on which this request has failed. Raises PoolEmpty if no other replica is
        ready, and PoolFull if the queue is full or the wait exceeds `timeout_seconds`. From a full queue, the newest
        request of the tenant with the most queued requests is removed if `tenant` has fewer.
        """
        if not self._usable(avoid):
            raise self._empty()
        replica = self._take(session, avoid)
        if replica is not None:
            return replica
        if len(self._waiting) >= self.max_queued:
            self._make_room(tenant)
        waiter = _Waiter(session, avoid, asyncio.get_running_loop().create_future())
        replica = await self._wait(Entry(tenant, session, waiter), timeout_seconds)
        if replica is None:
            raise self._empty()
        return replica

    def release(self, replica: Replica) -> None:
        """End a request on `replica`, which is assigned to the next request in the queue."""
        replica.in_flight -= 1
        self._assign(only_free=True)

    def mark_available(self, replica: Replica) -> None:
        """Record a successful health check."""
        replica.available = replica.seen_ready = True
        self._assign()

    def mark_unavailable(self, replica: Replica) -> None:
        """Record a failed connection or health check: no more requests until a health check succeeds."""
        replica.available = False
        self._assign()

    def mark_hung(self, replica: Replica) -> None:
        """Record that a check found the engine's scheduler hung: no more requests until it generates a token."""
        replica.hung = True
        self._assign()

    def record_token(self, replica: Replica) -> None:
        """Record that the engine has generated a token."""
        changed = replica.hung
        replica.generated()
        if changed:
            self._assign()

    def record_success(self, replica: Replica) -> None:
        """Record an answer that is not a server error."""
        probed, changed = replica.probing, replica.probing or not replica.available
        replica.succeeded()
        if probed:
            asyncio.get_running_loop().call_later(SLOW_START_SECONDS, self._assign)
        if changed:
            self._assign()

    def record_error(self, replica: Replica) -> None:
        """Record a 5xx answer or a timeout, and eject the replica after several of them."""
        replica.errored()
        ejected = sum(each.ejected for each in self.replicas.values())
        if not replica.failing or ejected + 1 > MAX_EJECTED_FRACTION * len(self.replicas):
            return
        backoff = replica.eject()
        log.warning(
            "replica %s of the %s pool keeps failing; it is ejected for %.0f s",
            replica.url,
            self.name,
            backoff,
        )
        asyncio.get_running_loop().call_later(backoff, self._assign)
        self._assign()

    def observe(self, first_token_seconds: float | None, per_token_seconds: float | None) -> None:
        """Add an answer's speed to the running means."""
        self.time_to_first_token_seconds = _smoothed(self.time_to_first_token_seconds, first_token_seconds)
        self.time_per_output_token_seconds = _smoothed(self.time_per_output_token_seconds, per_token_seconds)

    def _make_room(self, tenant: str) -> None:
        """Remove a request from the full queue in favour of a new one of `tenant`. Raises PoolFull for the new one."""
        full = f"the {self.name} pool and its queue are full"
        displaced = self._waiting.displaced_by(tenant)
        if displaced is None:
            raise PoolFull(full)
        self._waiting.remove(displaced)
        if not displaced.item.place.done():
            displaced.item.place.set_exception(PoolFull(full))

    async def _wait(self, entry: Entry[_Waiter], timeout_seconds: float) -> Replica | None:
        self._waiting.add(entry)
        place = entry.item.place
        try:
            async with asyncio.timeout(timeout_seconds):
                return await place
        except TimeoutError:
            if place.done() and not place.cancelled():  # assigned at the last moment
                return place.result()
            raise PoolFull(f"the {self.name} pool was busy for {timeout_seconds:g} s") from None
        except asyncio.CancelledError:
            assigned = place.done() and not place.cancelled() and place.exception() is None
            replica = place.result() if assigned else None
            if replica is not None:
                self.release(replica)
            raise
        finally:
            self._waiting.remove(entry)

    def _assign(self, *, only_free: bool = False) -> None:
        """Assign free replicas to queued requests, and reject requests without a usable replica.

        With `only_free`, stop as soon as no replica is free. This is sufficient if the set of ready replicas has not
        changed, because then no request has lost its last usable replica.
        """
        while self._assign_first(only_free):
            pass

    def _assign_first(self, only_free: bool) -> bool:
        """Assign a replica to the first request that can use one, or reject it. Returns whether there was one."""
        for entry in self._waiting:
            waiter = entry.item
            if waiter.place.done():  # cancelled, and about to leave the queue
                continue
            usable = self._usable(waiter.avoid)
            replica = self._take(waiter.affinity, waiter.avoid) if usable else None
            if replica is not None:
                self._waiting.serve(entry)
            elif not usable:
                self._waiting.remove(entry)
            elif only_free and not self.has_room:
                return False
            else:
                continue
            waiter.place.set_result(replica)
            return True
        return False

    def _usable(self, avoid: frozenset[str]) -> list[Replica]:
        return [replica for replica in self.ready if replica.url not in avoid]

    def _take(self, session: str | None, avoid: frozenset[str]) -> Replica | None:
        """Reserve a replica if one is free."""
        limit, usable = self.max_in_flight_per_replica, self._usable(avoid)
        share = LOAD_FACTOR * (sum(replica.in_flight for replica in usable) + 1) / max(1, len(usable))
        free = [replica for replica in usable if not replica.probing or replica.accepts(limit)]
        # In slow start a replica receives only a part of its share, unless the others are full.
        eager = [each for each in free if each.weight == 1.0 or each.in_flight < each.weight * share]
        replica = preferred(session, eager, limit) or preferred(session, free, limit)
        if replica is not None:
            replica.in_flight += 1
        return replica

    def _empty(self) -> PoolEmpty:
        return PoolEmpty(f"no replica of the {self.name} pool is ready")


def _smoothed(mean: float | None, value: float | None) -> float | None:
    if value is None or mean is None:
        return mean if value is None else value
    return mean + SMOOTHING * (value - mean)
