"""What an engine has to do for the tokens of a prompt. This module performs no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

FETCH_THRESHOLD_TOKENS: Final = 256
"""Tokens below which SGLang computes the missing part of a prefix instead of fetching it (`prefetch_threshold`)."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens of a prompt, by what a replica has to do for them. Their sum is the length of the prompt."""

    held: int
    """Cached in the replica's own memory."""
    fetchable: int
    """Not held, but in a prefix cache in common with other replicas."""
    prefill: int
    """Neither held nor fetchable."""

    @classmethod
    def of(cls, length: int, held: int, shared: int) -> Self:
        """The tokens of a prompt of `length` tokens.

        held, shared: the length of its prefix in the replica's memory and in the common prefix cache; 0 if there is
        none.
        """
        held = min(max(0, held), length)
        missing = min(shared, length) - held
        fetchable = missing if missing >= FETCH_THRESHOLD_TOKENS else 0
        return cls(held, fetchable, length - held - fetchable)

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

    def tokens(self, replica: str) -> PromptTokens:
        """What the replica with this id has to do for the tokens of the prompt."""
        return PromptTokens.of(self.length, self.held.get(replica, 0), self.shared)
