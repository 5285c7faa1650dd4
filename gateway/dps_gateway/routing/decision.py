"""What a routing policy is given and what it answers. Pure values, no I/O."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dps_gateway.pool import Pool


class Reason(StrEnum):
    """Why a turn went where it went (response header `x-dps-reason`)."""

    WITHIN_THRESHOLD = "within_threshold"
    OVER_THRESHOLD = "over_threshold"
    FIXED = "fixed"
    FAILOVER = "failover"
    OVERLOAD = "overload"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn to route: the whole input of a policy.

    `prompt_tokens` is L_t and `delta_tokens` ΔL_t = L_t - L_{t-1} (paper, Eq. 1; L_0 = 0).
    `draw` is a uniform number in [0, 1) supplied by the caller, so that a random policy stays pure.
    """

    prompt_tokens: int
    delta_tokens: int
    draw: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a turn goes, and why."""

    pool: Pool
    reason: Reason


class Policy(Protocol):
    """A routing policy: a pure function of one turn."""

    def decide(self, turn: Turn, /) -> Decision: ...
