"""The input and the result of a routing policy. This module performs no I/O."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dps_gateway.pool import Pool


class Reason(StrEnum):
    """Why a turn was sent to its pool (response header `x-dps-reason`)."""

    WITHIN_THRESHOLD = "within_threshold"
    OVER_THRESHOLD = "over_threshold"
    FIXED = "fixed"
    FAILOVER = "failover"
    OVERLOAD = "overload"


@dataclass(frozen=True, slots=True)
class Turn:
    """The input of a policy.

    `prompt_tokens` is L_t and `delta_tokens` is ΔL_t = L_t - L_{t-1} (paper, Eq. 1; L_0 = 0), in tokens.
    `draw` is a uniform random number in [0, 1), supplied by the caller so that a random policy remains pure.
    """

    prompt_tokens: int
    delta_tokens: int
    draw: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The pool for a turn, and the reason."""

    pool: Pool
    reason: Reason


class Policy(Protocol):
    """A routing policy: a pure function of one turn."""

    def decide(self, turn: Turn, /) -> Decision: ...
