"""The memory for the bodies of the requests in progress."""

from collections import Counter

from dps_gateway.config import Limits


class BodyBudget:
    """Counts the bytes of the bodies that this process holds, up to limits.maxBufferedBytes.

    That limit is at least limits.maxBodyBytes. If there are several tenants, one of them holds at most as many bytes as
    it leaves free, or one body of the maximum size (Choudhury and Hahne: Dynamic Queue Length Thresholds for
    Shared-Memory Packet Switches, 1998). Of two tenants that send as much as they can, each therefore holds a third,
    and the last third remains for others.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        """The bytes that are reserved, by tenant."""
        self.used = 0
        """The bytes that are reserved."""

    def reserve(self, tenant: str, size: int, limits: Limits, *, shared: bool) -> bool:
        """Reserve `size` bytes for a tenant until they are released. Returns whether there was room for them.

        shared: whether there are several tenants.
        """
        free = max(limits.max_buffered_bytes, limits.max_body_bytes) - self.used - size
        if free < 0 or (shared and self._held[tenant] + size > max(free, limits.max_body_bytes)):
            return False
        self.used += size
        self._held[tenant] += size
        return True

    def release(self, tenant: str, size: int) -> None:
        """Release bytes that have been reserved."""
        self.used -= size
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
