"""The two pools that a turn can be routed to. `upstream/engine_pool.py` contains the replicas of a pool."""

from enum import StrEnum


class Pool(StrEnum):
    """The pool of engines that a turn is routed to."""

    SPECULATIVE = "speculative"
    GREEDY = "greedy"

    @property
    def other(self) -> "Pool":
        return Pool.GREEDY if self is Pool.SPECULATIVE else Pool.SPECULATIVE
