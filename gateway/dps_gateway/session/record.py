"""The session record: the few most recent points of a session's history, and how they are compared and merged.

Pure. A *point* is a prompt that an engine has begun to answer: the digest of the rendered prompt up to its last
message boundary (what follows is the generation prompt, which the next turn may not repeat), and its length.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

import orjson

from dps_gateway.pool import Pool

RECENT_POINTS: Final = 4
"""Points kept besides each pool's newest: enough for a few sub-agents under one id."""

_POOL_BITS: Final = {Pool.SPECULATIVE: 1, Pool.GREEDY: 2}


class History(StrEnum):
    """How a prompt relates to what the session's engines have seen (response header `x-dps-history`)."""

    NEW = "new"
    GROWN = "grown"
    BRANCHED = "branched"
    CHANGED = "changed"
    STATELESS = "stateless"


@dataclass(frozen=True, slots=True)
class Point:
    """One prompt of the session, as far as later prompts can be compared with it.

    `offset` is where the digest ends, in bytes of the rendered prompt; `tokens` the tokens up to there, or 0
    where tokens may merge across it; `length` is L_t of the whole prompt, in tokens.
    """

    turn: int
    digest: str
    offset: int
    tokens: int
    length: int
    pools: frozenset[Pool]


@dataclass(frozen=True, slots=True)
class Record:
    """What is remembered of a session: points, newest first, and the newest turn's span (W3C traceparent)."""

    points: tuple[Point, ...]
    span: str = ""

    @property
    def turn(self) -> int:
        return self.points[0].turn if self.points else 0

    def encode(self) -> bytes:
        """The stored form: a JSON array, about 60 bytes a point."""
        return orjson.dumps(
            [
                self.span,
                [[p.turn, p.digest, p.offset, p.tokens, p.length, _bits(p.pools)] for p in self.points],
            ]
        )

    @classmethod
    def decode(cls, raw: bytes) -> "Record":
        """Read the stored form. Raises ValueError for anything else."""
        try:
            data: Any = orjson.loads(raw)
            span, points = data
            return cls(tuple(_point(*fields) for fields in points), str(span))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a session record: {error}") from error

    def with_point(self, point: Point, span: str = "") -> Self:
        """This record after a turn was answered: atomic to apply, in any order, any number of times.

        Only forward: points are ordered by the turn they were decided at, so that a slow duplicate of an older
        turn finds its place behind newer ones. The same prompt twice is one point.
        """
        known = next((p for p in self.points if p.digest == point.digest), None)
        if known is None:
            points = [*self.points, point]
        else:
            point = replace(point, turn=max(known.turn, point.turn), pools=known.pools | point.pools)
            points = [point if p is known else p for p in self.points]
        ordered = sorted(points, key=lambda p: -p.turn)  # stable: a tie goes to the one that came first
        newest = ordered[0].digest == point.digest
        return type(self)(tuple(_keep(ordered)), span if newest and span else self.span)

    def recalling(self, point: Point) -> Self:
        """This record with a point of its past that it may have dropped: to compare a prompt with, not to keep."""
        if any(known.digest == point.digest for known in self.points):
            return self
        return type(self)(tuple(sorted([*self.points, point], key=lambda p: -p.turn)), self.span)

    def merged(self, other: Self) -> Self:
        """Both histories in one, as after an outage in which only one of them was written."""
        result = self
        for point in reversed(other.points):
            result = result.with_point(point, other.span)
        return result

    def with_length(self, digest: str, length: int) -> Self:
        """This record with the length (tokens) that the engine reports for a prompt."""
        points = tuple(replace(p, length=length) if p.digest == digest else p for p in self.points)
        return type(self)(points, self.span)

    def without_cache(self, pool: Pool, keep: str) -> Self:
        """This record after `pool` showed that it has evicted the session: only the point `keep` is in its cache."""
        points = tuple(p if p.digest == keep else replace(p, pools=p.pools - {pool}) for p in self.points)
        return type(self)(points, self.span)


@dataclass(frozen=True, slots=True)
class Growth:
    """How much a prompt grew, as the policies see it. Tokens."""

    history: History
    base: Point | None
    """The longest remembered point that is a prefix of the prompt: what L_{t-1} means."""
    seen: dict[Pool, Point]
    """The longest such point that each pool has in its cache."""

    def delta_tokens(self, prompt_tokens: int) -> int:
        """ΔL_t = L_t - L_{t-1} (Eq. 1), with L_0 = 0."""
        return max(0, prompt_tokens - (self.base.length if self.base else 0))

    def uncached_tokens(self, prompt_tokens: int, pool: Pool) -> int:
        """What `pool` has to prefill for this prompt, as far as the record knows."""
        point = self.seen.get(pool)
        return max(0, prompt_tokens - (point.length if point else 0))


def compare(record: Record | None, is_prefix: Callable[[Point], bool]) -> Growth:
    """Find the longest points of `record` that are prefixes of a prompt.

    The newest point: the prompt has `grown`; an older one: it has `branched`; none: it has `changed`.
    """
    if record is None or not record.points:
        return Growth(History.NEW, None, {})
    base: Point | None = None
    seen: dict[Pool, Point] = {}
    for point in sorted(record.points, key=lambda p: (-p.offset, -p.turn)):
        wanted = base is None or not point.pools <= seen.keys()
        if not wanted or not is_prefix(point):
            continue
        base = base or point
        for pool in point.pools:
            seen.setdefault(pool, point)
    if base is None:
        return Growth(History.CHANGED, None, {})
    return Growth(History.GROWN if base is record.points[0] else History.BRANCHED, base, seen)


def _keep(ordered: list[Point]) -> Iterable[Point]:
    """The newest few, and the newest that each pool has seen."""
    unseen = set(_POOL_BITS)
    for rank, point in enumerate(ordered):
        if rank < RECENT_POINTS or point.pools & unseen:
            yield point
        unseen -= point.pools


def _bits(pools: frozenset[Pool]) -> int:
    return sum(_POOL_BITS[pool] for pool in pools)


def _point(turn: int, digest: str, offset: int, tokens: int, length: int, bits: int) -> Point:
    pools = frozenset(pool for pool, bit in _POOL_BITS.items() if bits & bit)
    return Point(int(turn), str(digest), int(offset), int(tokens), int(length), pools)
