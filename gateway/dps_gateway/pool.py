"""The two kinds of engine deployment."""

from enum import StrEnum


class Pool(StrEnum):
    """The kind of engine deployment that a turn is routed to."""

    SPECULATIVE = "speculative"
    GREEDY = "greedy"

    @property
    def other(self) -> "Pool":
        return Pool.GREEDY if self is Pool.SPECULATIVE else Pool.SPECULATIVE
