"""What a pool has to do for the tokens of a prompt. This module performs no I/O."""

from dataclasses import dataclass
from typing import Final, Self

FETCH_THRESHOLD_TOKENS: Final = 256
"""Tokens below which SGLang computes the missing part of a prefix instead of fetching it (`prefetch_threshold`)."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens of a prompt, by what a pool has to do for them. Their sum is the length of the prompt."""

    held: int
    """Cached in the memory of the pool's engines."""
    fetchable: int
    """Not held, but in a prefix cache in common with the other pool."""
    prefill: int
    """Neither held nor fetchable."""

    @classmethod
    def of(cls, length: int, held: int, shared: int) -> Self:
        """The tokens of a prompt of `length` tokens.

        held, shared: the length of its prefix in the pool's engines and in the common prefix cache; 0 if there is none.
        """
        held = min(max(0, held), length)
        missing = min(shared, length) - held
        fetchable = missing if missing >= FETCH_THRESHOLD_TOKENS else 0
        return cls(held, fetchable, length - held - fetchable)

    @property
    def uncached(self) -> int:
        """Tokens that are not held."""
        return self.fetchable + self.prefill
