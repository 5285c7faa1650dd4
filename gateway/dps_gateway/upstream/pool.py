"""One pool of engine replicas: who is ready, how busy, and who is waiting for a place."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from dps_gateway.pool import Pool
from dps_gateway.upstream.affinity import preferred

SMOOTHING: Final = 0.1
"""Weight of the newest observation in the pool's running means."""


class PoolFull(Exception):
    """All replicas are busy and so is the queue, or the wait for a place was too long."""


class PoolEmpty(Exception):
    """No replica of the pool is ready."""


class Replica:
    """One engine server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.ready = True
        self.seen_ready = False
        """Whether it ever answered: a replica is trusted until it fails, but the gateway is not ready by hope."""

    def succeeded(self) -> None:
        self.ready = self.seen_ready = True

    def failed(self) -> None:
        """It refused a connection or a health check: it gets no request until a health check succeeds."""
        self.ready = False


class EnginePool:
    """The replicas of one pool, and what this gateway has observed of them."""

    def __init__(
        self, name: Pool, max_in_flight_per_replica: int, max_queued: int, api_key: str | None = None
    ) -> None:
        self.name = name
        self.max_in_flight_per_replica = max_in_flight_per_replica
        self.max_queued = max_queued
        self.api_key = api_key
        self.replicas: dict[str, Replica] = {}
        self.time_to_first_token_seconds: float | None = None
        """Running mean over recent streamed answers; None until there is one."""
        self.time_per_output_token_seconds: float | None = None
        """Running mean over recent streamed answers; None until there is one."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def configure(self, max_in_flight_per_replica: int, max_queued: int, api_key: str | None) -> None:
        """Apply new limits and a new API key. Requests in flight are unaffected."""
        self.max_in_flight_per_replica = max_in_flight_per_replica
        self.max_queued = max_queued
        self.api_key = api_key
        self._wake(len(self._waiting))

    def set_endpoints(self, urls: Iterable[str]) -> None:
        """Take in what discovery found. Requests on a replica that is gone finish there."""
        self.replicas = {url: self.replicas.get(url) or Replica(url) for url in urls}
        self._wake(len(self._waiting))

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.ready]

    @property
    def in_flight(self) -> int:
        return sum(replica.in_flight for replica in self.replicas.values())

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a request would be sent at once."""
        return any(replica.in_flight < self.max_in_flight_per_replica for replica in self.ready)

    async def acquire(self, session: str | None, avoid: frozenset[str], timeout_seconds: float) -> Replica:
        """A replica for one request; the caller must `release` it. Waits its turn when all are busy.

        `avoid` are replicas that have failed this request. Raises PoolEmpty if none is left, PoolFull if the
        queue is full or the wait too long.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            usable = [replica for replica in self.ready if replica.url not in avoid]
            if not usable:
                raise PoolEmpty(f"no replica of the {self.name} pool is ready")
            replica = preferred(session, usable, self.max_in_flight_per_replica)
            if replica is not None:
                replica.in_flight += 1
                return replica
            if len(self._waiting) >= self.max_queued:
                raise PoolFull(f"the {self.name} pool and its queue are full")
            place: asyncio.Future[None] = loop.create_future()
            self._waiting.append(place)
            try:
                async with asyncio.timeout_at(deadline):
                    await place
            except TimeoutError:
                raise PoolFull(f"the {self.name} pool was busy for {timeout_seconds:g} s") from None
            except BaseException:  # cancelled just as it got its place: the next one in line takes it
                if place.done() and not place.cancelled():
                    self._wake(1)
                raise
            finally:
                if place in self._waiting:
                    self._waiting.remove(place)

    def release(self, replica: Replica) -> None:
        """Give back a place; the longest waiting request gets it."""
        replica.in_flight -= 1
        self._wake(1)

    def observe(self, first_token_seconds: float | None, per_token_seconds: float | None) -> None:
        """Take an answer's speed into the running means."""
        self.time_to_first_token_seconds = _smoothed(self.time_to_first_token_seconds, first_token_seconds)
        self.time_per_output_token_seconds = _smoothed(self.time_per_output_token_seconds, per_token_seconds)

    def _wake(self, places: int) -> None:
        while places > 0 and self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                places -= 1


def _smoothed(mean: float | None, value: float | None) -> float | None:
    if value is None or mean is None:
        return mean if value is None else value
    return mean + SMOOTHING * (value - mean)
