"""The input and the result of a routing policy, and what a policy can learn from. This module performs no I/O."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

from dps_gateway.acceptance import REFERENCE, UNKNOWN, Acceptance
from dps_gateway.pool import Pool

FETCH_THRESHOLD_TOKENS: Final = 256
"""A shorter missing part of a prefix is computed instead of fetched: SGLang's default of `prefetch_threshold`."""


@dataclass(frozen=True, slots=True)
class CacheUnits:
    """The units in which a replica caches and fetches the tokens of a prompt."""

    page_tokens: int = 1
    """The size of a page. Only whole pages are cached."""
    fetch_threshold_tokens: int = FETCH_THRESHOLD_TOKENS
    """If the missing part of a prefix is shorter, it is computed instead of fetched."""

    def whole_pages(self, tokens: int) -> int:
        """The tokens of a prefix that are in whole pages."""
        return tokens - tokens % self.page_tokens


SINGLE_TOKENS: Final = CacheUnits()
"""The units of a replica that has not reported its own."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens of a prompt, by what a replica has to do for them. Their sum is the length of the prompt."""

    held: int
    """Cached in the replica's own memory."""
    fetchable: int
    """Not held, but in a prefix cache in common with other replicas."""
    prefill: int
    """Neither held nor fetchable."""
    page_rest: int = 0
    """The part of `prefill` that belongs to the cached prefix, but not to one of its whole pages."""

    @property
    def uncached(self) -> int:
        """Tokens that are not held."""
        return self.fetchable + self.prefill


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt, and the prefixes of it that are cached, according to the session's record. Lengths are in tokens."""

    length: int
    held: Mapping[str, int]
    """The length of the prefix that a replica has in its own memory, by the replica's id. Others have none."""
    shared: int = 0
    """The length of the prefix in the common prefix cache; 0 if there is none."""

    def tokens(self, replica: str, units: CacheUnits = SINGLE_TOKENS) -> PromptTokens:
        """What the replica with this id, which caches in these units, has to do for the tokens of the prompt."""
        held, shared = (min(max(0, each), self.length) for each in (self.held.get(replica, 0), self.shared))
        kept = units.whole_pages(held)
        missing = units.whole_pages(shared) - kept
        fetchable = missing if missing >= units.fetch_threshold_tokens else 0
        known = max(held, shared if fetchable else 0)
        return PromptTokens(kept, fetchable, self.length - kept - fetchable, known - kept - fetchable)


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


@dataclass(frozen=True, slots=True)
class Observation:
    """A completed turn. Times are in seconds since it was routed, so they include the wait in the gateway's queue."""

    pool: Pool
    turn: PolicyInput
    """The policy's input. Its `prompt_tokens` are those that the engine has reported."""
    view: PoolView
    """The pool's state when the turn was routed, with the replica that answered."""
    cached_tokens: int | None
    """Prompt tokens that the engine reported as cached, fetched ones included; None if it reported none."""
    fetched_tokens: int | None
    """The part of `cached_tokens` that the engine fetched from a common prefix cache; None if it did not report it."""
    output_tokens: int
    decoding_load: float
    """Other requests of the replica while it decoded the answer: the mean of the numbers at the beginning and the end.
    In a burst, it is far above the load of `view`."""
    later_prefill_tokens: float
    """Tokens to prefill of the prompts that this process sent to the replica after this one, and that the replica began
    to answer before it completed this answer. Their prefill interrupted the answer."""
    first_token_seconds: float | None
    """None if the answer was not streamed."""
    total_seconds: float
    verifications: int | None = None
    """Verifications of drafts; None if the engine reported none."""

    @property
    def work(self) -> float:
        """The output tokens; with drafts, the number that as many verifications yield with the acceptance REFERENCE.

        The time for a verification does not depend on the tokens that it yields.
        """
        return REFERENCE * self.verifications if self.verifications else float(self.output_tokens)


def decoding_load(at_start: int, at_end: int) -> float:
    """`Observation.decoding_load` from `Replica.load` at the beginning and at the end of the answer, with this turn."""
    return max(0.0, (at_start + at_end) / 2 - 1)


Document = dict[str, Any]
"""What one gateway replica has learned, as a JSON object."""


class LearningPolicy(ABC):
    """A policy that learns from completed turns. One instance serves one gateway process."""

    @abstractmethod
    def decide(self, turn: PolicyInput, /) -> Decision: ...

    @abstractmethod
    def observe(self, observation: Observation, /) -> int | None:
        """Learn from a completed turn.

        Returns the verifications of drafts that yielded the answer, inferred if the engine has reported none; None if
        they are unknown.
        """

    @abstractmethod
    def export(self) -> Document:
        """What this instance has learned from its own observations, for the other replicas."""

    @abstractmethod
    def absorb(self, documents: Iterable[Document], /) -> None:
        """Use what other replicas have learned.

        `documents` are the latest exports of all other replicas. They replace those absorbed before. Documents that are
        not valid, such as those of another version, are ignored.
        """
