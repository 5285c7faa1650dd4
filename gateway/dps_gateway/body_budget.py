"""The memory for the bodies of the requests in progress."""

from collections import Counter
from collections.abc import Callable


class BodyBudget:
    """Counts the bytes of the bodies that this process holds, up to a limit.

    If there are several tenants, one of them holds at most as many bytes as it leaves free (Choudhury and Hahne:
    Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, 1998). Of two tenants that send as much as they
    can, each therefore holds a third, and the last third remains for others.

    `limit` returns the maximum number of bytes, and `minimum` the number that each of several
    tenants may hold if there is room, or None if there is only one tenant, which may use all of the memory. Both are
    functions, because they can be reloaded.
    """

    def __init__(self, limit: Callable[[], int], minimum: Callable[[], int | None]) -> None:
        self._limit = limit
        self._minimum = minimum
        self._held: Counter[str] = Counter()
        """The bytes that are reserved, by tenant."""
        self.used = 0
        """The bytes that are reserved."""

    def reserve(self, tenant: str, size: int) -> bool:
        """Reserve `size` bytes for a tenant until they are released. Returns whether there was room for them."""
        if not self._has_room(tenant, size):
            return False
        self._count(tenant, size)
        return True

    def release(self, tenant: str, size: int) -> None:
        """Release bytes that have been reserved."""
        self._count(tenant, -size)

    def _has_room(self, tenant: str, size: int) -> bool:
        free = self._limit() - self.used - size
        minimum = self._minimum()
        if free < 0 or minimum is None:
            return free >= 0
        return self._held[tenant] + size <= max(free, minimum)

    def _count(self, tenant: str, change: int) -> None:
        self.used += change
        self._held[tenant] += change
        if not self._held[tenant]:
            del self._held[tenant]
