"""The load of all workers of one gateway replica, so that its limits apply to all of them together."""

import hashlib
import time
from collections.abc import Callable
from functools import cache
from typing import Final

from dps_gateway.shared_counts import NAME_BYTES, SharedCounts

_QUEUED: Final = b"queued".ljust(NAME_BYTES, b"\0")

TURN_SECONDS: Final = 0.05
"""Time for which a worker may have one slot more than others. It is longer than the interval at which a worker notices
slots that others have released."""


class WorkerLoad:
    """Publishes this worker's load, and applies limits to the sum of all workers.

    Two workers that take the last slot at the same moment may together exceed the limit of a replica by one.
    """

    def __init__(
        self, counts: SharedCounts | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`counts` is None if there is only one worker. All workers have the same `clock`, in seconds."""
        self._counts = counts
        self._clock = clock

    def publish_in_flight(self, pool: str, replica_id: str, requests: int) -> None:
        """Publish the number of this worker's requests on a replica of a pool."""
        if self._counts is not None:
            self._counts.publish(_name(pool, replica_id), requests)

    def publish_queued(self, requests: int) -> None:
        """Publish the number of requests in this worker's queue."""
        if self._counts is not None:
            self._counts.publish(_QUEUED, requests)

    def publish_buffered(self, size: int, tenant: str | None = None) -> None:
        """Publish the number of bytes that this worker has reserved for bodies, of one tenant or of all (None)."""
        if self._counts is not None:
            self._counts.publish(_bodies_of(tenant), size)

    @property
    def queued_elsewhere(self) -> int:
        """The number of requests in the queues of the other workers."""
        return 0 if self._counts is None else self._counts.of_others(_QUEUED)

    def buffered_elsewhere(self, tenant: str | None = None) -> int:
        """The number of bytes that the other workers have reserved for bodies, of one tenant or of all (None)."""
        return 0 if self._counts is None else self._counts.of_others(_bodies_of(tenant))

    def slots(self, pool: str, replica_id: str, limit: int) -> int:
        """The number of requests that this worker may have in flight to a replica that may have `limit` in all workers.

        While other workers have queued requests, a worker takes no more than its equal part. Otherwise a busy worker
        would take each slot that becomes free, before another one could. If the slots cannot be divided equally, the
        workers take turns in having one more, so that none waits forever if there are fewer slots than workers.
        """
        if self._counts is None:
            return limit
        free = max(0, limit - self._counts.of_others(_name(pool, replica_id)))
        others = self._counts.others_with(_QUEUED)
        if not others:
            return free
        part, rest = divmod(limit, len(others) + 1)
        rank = sum(path < self._counts.path for path in others)
        turn = int(self._clock() / TURN_SECONDS)
        return min(free, part + ((rank + turn) % (len(others) + 1) < rest))


def equal_part(limit: int, workers: int) -> int:
    """The part of a limit for each of several workers, at least 1 unless the limit is 0."""
    return max(min(limit, 1), limit // workers)


def _bodies_of(tenant: str | None) -> bytes:
    return _name("bodies", "" if tenant is None else f"of {tenant}")


@cache
def _name(pool: str, replica_id: str) -> bytes:
    return hashlib.blake2b(f"{pool}/{replica_id}".encode(), digest_size=NAME_BYTES).digest()
