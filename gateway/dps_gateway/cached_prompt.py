"""What an engine has to do for the tokens of a prompt. This module performs no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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
