"""The relation of a prompt to its session's history: the point it grew from, and the part that each replica has cached.

This module performs no I/O.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from dps_gateway.routing.decision import CachedPrompt
from dps_gateway.session.record import Point, Record


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
    parent: Point | None
    """The longest recorded point that is a prefix of the prompt, or None. Its length is used as L_{t-1}."""
    held: dict[str, Point]
    """The longest such point that each replica has in its KV cache, by the replica's id."""
    shared: Point | None = None
    """The longest such point that is in the common prefix cache, or None."""

    def delta_tokens(self, prompt_tokens: int) -> int:
        """ΔL_t = L_t - L_{t-1} (paper, Eq. 1), with L_0 = 0."""
        return max(0, prompt_tokens - (self.parent.length if self.parent else 0))

    def cached(self, prompt_tokens: int, *, common_prefix_cache: bool) -> CachedPrompt:
        """The cached prefixes of the prompt, according to the record."""
        held = {replica: point.length for replica, point in self.held.items()}
        shared = self.shared.length if self.shared is not None and common_prefix_cache else 0
        return CachedPrompt(prompt_tokens, held, shared)


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
    parent = prefixes[-1]
    held = {holder.replica: point for point in prefixes for holder in point.holders}
    shared = next((point for point in reversed(prefixes) if point.shared), None)
    grown = record.head(parent.conversation) is parent
    return Growth(History.GROWN if grown else History.BRANCHED, parent, held, shared)
