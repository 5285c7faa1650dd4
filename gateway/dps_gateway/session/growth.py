"""The relation of a prompt to its session's history: the point that it grew from, and how much each pool has cached.

This module performs no I/O.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dps_gateway.pool import Pool
from dps_gateway.session.record import Point, Record

FETCH_THRESHOLD_TOKENS: Final = 256
"""Tokens below which SGLang computes the missing part of a prefix instead of fetching it (`prefetch_threshold`)."""


class History(StrEnum):
    """The relation of a prompt to its session's history (response header `x-dps-history`)."""

    NEW = "new"
    GROWN = "grown"
    BRANCHED = "branched"
    CHANGED = "changed"
    STATELESS = "stateless"


@dataclass(frozen=True, slots=True)
class Growth:
    """The result of comparing a prompt with its session's record. Lengths are in tokens."""

    history: History
    base: Point | None
    """The longest recorded point that is a prefix of the prompt, or None. Its length is used as L_{t-1}."""
    seen: dict[Pool, Point]
    """The longest such point that each pool has in its KV cache."""

    def delta_tokens(self, prompt_tokens: int) -> int:
        """ΔL_t = L_t - L_{t-1} (paper, Eq. 1), with L_0 = 0."""
        return max(0, prompt_tokens - (self.base.length if self.base else 0))

    def uncached_tokens(self, prompt_tokens: int, pool: Pool) -> int:
        """Tokens of the prompt that are not in `pool`'s KV cache, according to the record."""
        point = self.seen.get(pool)
        return max(0, prompt_tokens - (point.length if point else 0))

    def fetchable_tokens(self, prompt_tokens: int, pool: Pool) -> int:
        """Tokens that `pool` can fetch from a prefix cache in common with the other pool, according to the record."""
        missing = self.uncached_tokens(prompt_tokens, pool) - self.uncached_tokens(prompt_tokens, pool.other)
        return missing if missing >= FETCH_THRESHOLD_TOKENS else 0


def compare(record: Record | None, is_prefix: Callable[[Point], bool]) -> Growth:
    """Find the longest points of `record` that are prefixes of a prompt.

    If the longest is the head of its conversation, the prompt has `grown`; if it is an older point, the prompt has
    `branched`; if no point is a prefix, the history has `changed`.
    """
    if record is None or not record.points:
        return Growth(History.NEW, None, {})
    # The points are compared in ascending order of offset, so that every byte of the prompt is hashed only once.
    prefixes = [p for p in sorted(record.points, key=lambda p: (p.offset, p.turn)) if is_prefix(p)]
    if not prefixes:
        return Growth(History.CHANGED, None, {})
    base = prefixes[-1]
    seen = {pool: point for point in prefixes for pool in point.pools}
    grown = record.head(base.conversation) is base
    return Growth(History.GROWN if grown else History.BRANCHED, base, seen)
