"""The input and the result of a routing policy. This module performs no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dps_gateway.acceptance import UNKNOWN, Acceptance
from dps_gateway.cached_prompt import PromptTokens
from dps_gateway.pool import Pool


class Reason(StrEnum):
    """Why a turn was sent to its pool (response header `x-dps-reason`)."""

    WITHIN_THRESHOLD = "within_threshold"
    OVER_THRESHOLD = "over_threshold"
    FIXED = "fixed"
    PREDICTED_FASTER = "predicted_faster"
    FAILOVER = "failover"
    OVERLOAD = "overload"


@dataclass(frozen=True, slots=True)
class PoolView:
    """The state of one pool when a turn is routed, as far as the gateway has observed it.

    The load and the tokens of the prompt are those of the replica that would serve the turn.
    """

    ready_replicas: int
    in_flight: float
    """Requests that the replica is serving."""
    queued: float
    """Requests that wait for the replica."""
    queued_prefill_tokens: float
    """Tokens that the replica has to prefill before this turn's prompt."""
    free_tokens: float
    """Tokens of the KV cache that are left after those of the running requests and of the queued prefills. It is
    negative if the memory is not sufficient for these, and infinite if it is unknown."""
    running_limit: int | None
    """Maximum number of requests that the replica runs at the same time; None if unknown."""
    replica: str
    """The replica's id."""
    prompt: PromptTokens
    """What the replica has to do for the turn's prompt, according to the session's record."""

    @property
    def load(self) -> float:
        """Requests that the replica is serving or that wait for it."""
        return self.in_flight + self.queued


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """The input of a policy.

    `prompt_tokens` is L_t and `delta_tokens` is ΔL_t = L_t - L_{t-1} (paper, Eq. 1; L_0 = 0), in tokens.
    `draw` is a uniform random number in [0, 1), supplied by the caller so that a random policy remains pure.
    `number` is t, which is 1 for the first turn. `last_pool` served the turn that the prompt grew from; it is None if
    there is none. `pools` describes the pools; a pool that is not listed has no ready replica. `acceptance` is what is
    known about the drafts of the session, and `kind` names the sessions that are expected to be like it.
    """

    prompt_tokens: int
    delta_tokens: int
    draw: float
    number: int
    last_pool: Pool | None
    pools: Mapping[Pool, PoolView]
    acceptance: Acceptance = UNKNOWN
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The pool for a turn, and the reason."""

    pool: Pool
    reason: Reason
    predicted: Mapping[Pool, float] | None = None
    """Seconds until the turn would be complete in each ready pool; None if the policy does not predict them."""
    expected_tokens: float | None = None
    """Expected tokens per verification of this session; None if the policy does not use them."""
    stateless: bool = False
    """Whether the request is not a turn, so that the pool with the first free slot may serve it."""


class Policy(Protocol):
    """A routing policy: a function of one turn, without I/O."""

    def decide(self, turn: PolicyInput, /) -> Decision: ...
