"""The learned transfer rate of each replica. This module performs no I/O.

The replicas of a pool can differ: one may be on the node that has the storage, while another fetches over the network.
"""

from collections.abc import MutableMapping
from typing import Final

from dps_gateway.routing.regression import Moments

MEMORY: Final = 0.99
"""Factor of the weight of a fetch for each later fetch of the same replica."""

STRENGTH: Final = 50.0
"""Weight of the pool's rate in that of a replica. A fetch of n thousand tokens has the weight n^2."""

MAX_REPLICAS: Final = 256
"""Maximum number of replicas. The one whose last fetch is the oldest is dropped first."""


class FetchRates:
    """The time per 1,000 fetched tokens of each replica of one pool, in seconds.

    The estimate for a replica with few fetches is close to that of its pool. It is not exchanged with other gateway
    processes, because it depends on what this process has learned about the pool.
    """

    def __init__(self) -> None:
        self._fetches: MutableMapping[str, Moments] = {}
        """Seconds by thousands of tokens, by the replica's id, in the order of their last fetches."""

    def observe(self, replica: str, thousands: float, seconds: float, weight: float) -> None:
        """Add a fetch of `thousands` of tokens. Other causes may have made `seconds` longer, or even negative."""
        fetches = self._fetches.pop(replica, None) or Moments.zero(1)
        fetches.decay(MEMORY)
        fetches.add([thousands], seconds, weight)
        self._fetches[replica] = fetches
        if len(self._fetches) > MAX_REPLICAS:
            del self._fetches[next(iter(self._fetches))]

    def of(self, replica: str, pool_rate: float) -> float:
        """The rate of a replica, if that of its pool is `pool_rate`. It is not negative."""
        fetches = self._fetches.get(replica)
        if fetches is None:
            return pool_rate
        (products,), (responses,) = fetches.products, fetches.responses
        return max(0.0, (responses + STRENGTH * pool_rate) / (products + STRENGTH))

    def decay(self, factor: float) -> None:
        """Multiply the weights of all fetches by `factor`."""
        for fetches in self._fetches.values():
            fetches.decay(factor)
