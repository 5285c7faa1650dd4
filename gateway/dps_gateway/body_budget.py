"""The memory for the bodies of the requests in progress. This module performs no I/O."""

from collections.abc import Callable


class BodyBudget:
    """Counts the bytes of the bodies that this process holds, up to a limit.

    `limit` returns the maximum number of bytes. It is a function, because it can be reloaded.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self.used = 0
        """The bytes that are reserved."""

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes until they are released. Returns whether there was room for them."""
        if self.used + size > self._limit():
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        """Release bytes that have been reserved."""
        self.used -= size
