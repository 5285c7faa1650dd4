"""What a learning policy observes, and how its gateway replicas share it. This module performs no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

from dps_gateway.acceptance import REFERENCE
from dps_gateway.cached_prompt import PromptTokens
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Policy


def decoding_load(at_start: int, at_end: int) -> float:
    """`Observation.decoding_load` from `Replica.load` at the beginning and at the end of the answer, with this turn."""
    return max(0.0, (at_start + at_end) / 2 - 1)


@dataclass(frozen=True, slots=True)
class Observation:
    """A completed turn. Lengths are in tokens.

    Times are in seconds since the turn was routed, so they include the wait in the gateway's queue.
    """

    pool: Pool
    replica: str
    """The id of the replica that answered."""
    prompt_tokens: int
    delta_tokens: int
    """ΔL_t."""
    expected: PromptTokens
    """What the replica had to do for the prompt, according to the session's record when the turn was routed."""
    cached_tokens: int | None
    """Prompt tokens that the engine reported as cached, fetched ones included; None if it reported none."""
    fetched_tokens: int | None
    """The part of `cached_tokens` that the engine fetched from a common prefix cache; None if it did not report it."""
    output_tokens: int
    load: float
    """`PoolView.load` of the pool, when the turn was routed."""
    decoding_load: float
    """Other requests of the replica while it decoded the answer: the mean of the numbers at the beginning and the end.
    In a burst, it is far above `load`."""
    running_limit: int | None
    """`PoolView.running_limit` of the pool, when the turn was routed."""
    queued_prefill_tokens: float
    """`PoolView.queued_prefill_tokens` of the pool, when the turn was routed."""
    later_prefill_tokens: float
    """Tokens to prefill of the prompts that this process sent to the replica after this one, and that the replica began
    to answer before it completed this answer. Their prefill interrupted the answer."""
    first_token_seconds: float | None
    """None if the answer was not streamed."""
    total_seconds: float
    number: int
    """The turn's number in its session."""
    verifications: int | None = None
    """Verifications of drafts; None if the engine reported none."""
    kind: str = ""
    """`PolicyInput.kind` of the session."""

    @property
    def work(self) -> float:
        """The output tokens; with drafts, the number that as many verifications yield with the acceptance REFERENCE.

        The time for a verification does not depend on the tokens that it yields.
        """
        return REFERENCE * self.verifications if self.verifications else float(self.output_tokens)


Document = dict[str, Any]
"""What one gateway replica has learned, as a JSON object."""


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that learns from completed turns. One instance serves one gateway process."""

    def observe(self, observation: Observation, /) -> None:
        """Learn from a completed turn."""

    def drafted(self, observation: Observation, /) -> tuple[int, int] | None:
        """The tokens of an answer and the verifications of drafts that yielded them, as the policy estimates them if
        the engine reports none; None if they are not known."""

    def export(self) -> Document:
        """What this instance has learned from its own observations, for the other replicas."""

    def absorb(self, documents: Iterable[Document], /) -> None:
        """Use what other replicas have learned.

        `documents` are the latest exports of all other replicas. They replace those absorbed before. Documents that are
        not valid, such as those of another version, are ignored.
        """


def learns(policy: Policy) -> TypeGuard[LearningPolicy]:
    """Whether a policy learns. This is looked up once for each class, because checking a protocol is slow."""
    return _learns(type(policy))


@cache
def _learns(kind: type[Policy]) -> bool:
    return issubclass(kind, LearningPolicy)
