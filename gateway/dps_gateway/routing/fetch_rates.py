"""The learned transfer rate of each replica. This module performs no I/O.

The replicas of a pool can differ: one may be on the node that has the storage, while another fetches over the network.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

MEMORY: Final = 0.99
"""Factor of the weight of a fetch for each later fetch of the same replica."""

STRENGTH: Final = 50.0
"""Weight of the pool's rate in that of a replica. A fetch of n thousand tokens has the weight n^2."""

MAX_REPLICAS: Final = 256
"""Maximum number of replicas. The one whose last fetch is the oldest is dropped first."""


@dataclass(slots=True)
class _Fetches:
    """Decayed sums over the fetches of one replica of x thousand tokens in y seconds."""

    products: float = 0.0
    """Sum of w x x."""
    responses: float = 0.0
    """Sum of w x y."""

    def decay(self, factor: float) -> None:
        self.products *= factor
        self.responses *= factor


class FetchRates:
    """The time per 1,000 fetched tokens of each replica of one pool, in seconds.

    The estimate for a replica with few fetches is close to that of its pool. It is not exchanged with other gateway
    processes, because it depends on what this process has learned about the pool.
    """

    def __init__(self) -> None:
        self._fetches: MutableMapping[str, _Fetches] = {}
        """By the replica's id, in the order of their last fetches."""

    def observe(self, replica: str, thousands: float, seconds: float, weight: float) -> None:
        """Add a fetch of `thousands` of tokens. Other causes may have made `seconds` longer, or even negative."""
        fetches = self._fetches.pop(replica, None) or _Fetches()
        fetches.decay(MEMORY)
        fetches.products += weight * thousands**2
        fetches.responses += weight * thousands * seconds
        self._fetches[replica] = fetches
        if len(self._fetches) > MAX_REPLICAS:
            del self._fetches[next(iter(self._fetches))]

    def of(self, replica: str, pool_rate: float) -> float:
        """The rate of a replica, if that of its pool is `pool_rate`. It is not negative."""
        fetches = self._fetches.get(replica)
        if fetches is None:
            return pool_rate
        return max(0.0, (fetches.responses + STRENGTH * pool_rate) / (fetches.products + STRENGTH))

    def decay(self, factor: float) -> None:
        """Multiply the weights of all fetches by `factor`."""
        for fetches in self._fetches.values():
            fetches.decay(factor)
