"""The memory for the bodies of the requests in progress. This module performs no I/O."""

from collections.abc import Callable

from dps_gateway.worker_load import WorkerLoad


class BodyBudget:
    """Counts the bytes of the bodies that this process holds, up to a limit.

    `limit` returns the maximum number of bytes of all `workers` together. It is a function, because it can be reloaded.
    """

    def __init__(self, limit: Callable[[], int], workers: WorkerLoad | None = None) -> None:
        self._limit = limit
        self._workers = workers or WorkerLoad()
        self.used = 0
        """The bytes that are reserved."""

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes until they are released. Returns whether there was room for them."""
        self._count(size)  # first, so that two workers cannot both use the same room
        if self.used + self._workers.buffered_elsewhere <= self._limit():
            return True
        self._count(-size)
        return False

    def release(self, size: int) -> None:
        """Release bytes that have been reserved."""
        self._count(-size)

    def _count(self, change: int) -> None:
        self.used += change
        self._workers.publish_buffered(self.used)
