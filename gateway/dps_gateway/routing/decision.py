"""What a routing policy is given and what it answers. Pure values, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from dps_gateway.pool import Pool


class Reason(StrEnum):
    """Why a turn went where it went (response header `x-dps-reason`)."""

    WITHIN_THRESHOLD = "within_threshold"
    OVER_THRESHOLD = "over_threshold"
    FIXED = "fixed"
    PREDICTED_FASTER = "predicted_faster"
    FAILOVER = "failover"
    OVERLOAD = "overload"


@dataclass(frozen=True, slots=True)
class PoolView:
    """What the gateway knows about one pool at the moment of the decision.

    Rates are this gateway's own recent observations, None until there are any.
    """

    uncached_tokens: int = 0
    """Prompt tokens that this pool would have to prefill: those its KV cache has not seen."""
    ready_replicas: int = 0
    in_flight: int = 0
    queued: int = 0
    time_to_first_token_seconds: float | None = None
    time_per_output_token_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn to route: the whole input of a policy.

    `prompt_tokens` is L_t and `delta_tokens` ΔL_t = L_t - L_{t-1} (paper, Eq. 1; L_0 = 0).
    `draw` is a uniform number in [0, 1) supplied by the caller, so that a random policy stays pure.
    """

    prompt_tokens: int
    delta_tokens: int
    max_output_tokens: int | None = None
    draw: float = 0.0
    pools: Mapping[Pool, PoolView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a turn goes, and why."""

    pool: Pool
    reason: Reason


class Policy(Protocol):
    """A routing policy: a pure function of one turn."""

    def decide(self, turn: Turn, /) -> Decision: ...
