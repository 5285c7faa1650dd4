"""The session record: the points of a session's history that later prompts are compared with.

A *point* describes a prompt that an engine has begun to answer by the digest of the rendered prompt up to its last
message boundary, and by the prompt's length. The digest excludes the generation prompt that follows the boundary,
because the next turn does not necessarily repeat it. This module performs no I/O.

One session id may be used for several *conversations*: those of sub-agents, or unrelated chats of one client.
Every point belongs to one of them, and the newest point of a conversation is its *head*.

The other entries of the store are pointers to sessions, and the places of stored responses. The keys of a session's
record and of the pointers to it contain the same hash tag (in braces), so that Redis Cluster keeps them in one slot.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

import orjson

from dps_gateway.acceptance import UNKNOWN, Acceptance
from dps_gateway.pool import ID_CHARS, Pool
from dps_gateway.session.identity import TAG_CHARS, Scope, SessionId

FORMAT_VERSION: Final = 4
"""Stored in every record. Records of other versions are ignored, and their sessions are treated as new."""

RECENT_POINTS: Final = 4
"""The number of newest points that are always kept, so that edited messages and regenerated answers are recognised."""

MAX_POINTS: Final = 64
"""Maximum number of points in a record (about 4 KB in total). The oldest are dropped first, and heads last."""

MAX_CONVERSATIONS: Final = MAX_POINTS - RECENT_POINTS
"""A record with this many conversations is full. One more could displace the head of another."""

HOLDERS_PER_POOL: Final = 2
"""The number of replicas of each pool that are kept for a point, and for which the newest point of a conversation is
kept. A session uses a second one while its preferred replica is overloaded."""

MAX_NUMBER: Final = 2**53
"""The largest valid number in a record. Integers of more than 64 bits could not be serialized."""

_LABEL_CHARS: Final = 6
_LETTERS: Final = {Pool.SPECULATIVE: "s", Pool.GREEDY: "g"}
_POOLS: Final = {letter: pool for pool, letter in _LETTERS.items()}
_CACHED_ON: Final = rf"([{''.join(_POOLS)}])([A-Za-z0-9_-]{{{ID_CHARS}}})"
_SHARED: Final = "+"


class CachedOn(NamedTuple):
    """A replica that has a prompt in its KV cache."""

    pool: Pool
    replica: str
    """The replica's id (`replica_id`)."""


class Point(NamedTuple):
    """The data about one prompt of the session that is needed to compare later prompts with it."""

    turn: int
    digest: str
    offset: int
    """The length of the prefix that the digest covers, in bytes of the rendered prompt."""
    tokens: int
    """The gateway's count of the tokens up to `offset`, or 0 if tokens may merge across it."""
    counted: int
    """The gateway's count of the whole prompt, in tokens."""
    holders: tuple[CachedOn, ...]
    """The replicas that have the prompt in their KV cache, the one that answered it last first."""
    correction: int = 0
    """Tokens that the engine reported for this prompt beyond `counted`; negative if it reported fewer."""
    conversation: str = ""
    """The label of the conversation within the session."""
    shared: bool = False
    """Whether the prompt is in a prefix cache that the pools have in common, as far as is known."""

    @property
    def length(self) -> int:
        """L_t: the length of the whole prompt in the engine's tokens.

        A correction that was found for a longer prompt could make it negative.
        """
        return max(0, self.counted + self.correction)

    @property
    def pools(self) -> frozenset[Pool]:
        """The pools with a replica that has the prompt in its KV cache."""
        return frozenset(holder.pool for holder in self.holders)


class Record(NamedTuple):
    """The points of a session, newest first."""

    points: tuple[Point, ...]
    span: str = ""
    """The span of the newest turn (W3C traceparent)."""
    affinity: str = ""
    """For a fork, the id of the session whose preferred replica has cached the shared prefix; otherwise empty."""
    acceptance: Acceptance = UNKNOWN
    outline: str = ""
    """The fingerprints of the first messages of the newest turn's prompt (`Outline`)."""

    @property
    def turn(self) -> int:
        """The number of the newest turn, 0 if there is none."""
        return self.points[0].turn if self.points else 0

    def head(self, conversation: str) -> Point | None:
        """The newest point of a conversation, or None if it has no points."""
        return next((p for p in self.points if p.conversation == conversation), None)

    @property
    def full(self) -> bool:
        """Whether it has no room for another conversation."""
        return len({point.conversation for point in self.points}) >= MAX_CONVERSATIONS

    def encode(self) -> bytes:
        """Serialize to a JSON array of about 65 bytes per point."""
        points = [_fields(p) for p in self.points]
        head = [FORMAT_VERSION, self.span, self.affinity, self.outline, points]
        return orjson.dumps([*head, *self.acceptance.encode()])

    @classmethod
    def decode(cls, raw: bytes) -> "Record":
        """Parse the stored form. Raises ValueError for anything else, and for other format versions."""
        try:
            data: Any = orjson.loads(raw)
            version, span, affinity, outline, points, *acceptance = data
            if version != FORMAT_VERSION:
                raise ValueError(f"format version {version!r}")
            return cls(
                tuple(_point(*fields) for fields in points),
                str(span),
                str(affinity),
                Acceptance.decode(*acceptance),
                str(outline),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a session record: {error}") from error

    def with_turn(self, point: Point, parent: Point | None, span: str = "", outline: str = "") -> Self:
        """This record after an engine has begun to answer `point`, which grew from `parent`.

        If the parent is the head of its conversation, the point continues that conversation. If the parent is an older
        point, the point is a branch and starts a new conversation, as does a point without a parent.
        """
        conversation = parent.conversation if parent is not None else ""
        head = self.head(conversation)
        if head is not None and (parent is None or head.digest != parent.digest):
            conversation = point.digest[:_LABEL_CHARS]
        return self.with_point(point._replace(conversation=conversation), span, outline)

    def with_point(self, point: Point, span: str = "", outline: str = "") -> Self:
        """This record with a point added. The operation is idempotent.

        Points are ordered by turn, so that a slow duplicate of an older turn is sorted behind newer ones. A prompt
        that is already in the record remains a single point.
        """
        known = next((p for p in self.points if p.digest == point.digest), None)
        if known is None:
            points = [*self.points, point]
        else:
            point = point._replace(
                turn=max(known.turn, point.turn),
                holders=_newest((*point.holders, *known.holders)),
                correction=known.correction or point.correction,
                conversation=known.conversation,
                shared=known.shared or point.shared,
            )
            points = [point if p is known else p for p in self.points]
        # Sorting is stable, so the first of two concurrent turns stays first.
        ordered = sorted(points, key=lambda p: -p.turn)
        newest = ordered[0].digest == point.digest
        kept = _limited(list(_retained(ordered)))
        result = self._replace(points=kept, span=span if newest and span else self.span)
        return result._replace(outline=outline) if newest and outline else result

    def recalling(self, point: Point) -> Self:
        """This record with a point that it may have dropped, for a comparison only."""
        if any(known.digest == point.digest for known in self.points):
            return self
        return self._replace(points=tuple(sorted([*self.points, point], key=lambda p: -p.turn)))

    def merged(self, other: Self) -> Self:
        """The union of both histories, for example after an outage in which the copies were extended independently."""
        result = self._replace(
            affinity=self.affinity or other.affinity,
            acceptance=max(self.acceptance, other.acceptance, key=lambda each: each.turn),
        )
        for point in reversed(other.points):
            result = result.with_point(point, other.span, other.outline)
        return result

    def corrected(
        self, digest: str, prompt_tokens: int, *, evicted_from: str | None = None, lost: bool = False
    ) -> Self:
        """This record after an engine has reported the length (tokens) of the prompt with this digest.

        The other points are no longer cached on the replica `evicted_from`, nor shared if the common prefix cache has
        `lost` them.
        """
        points = tuple(
            p._replace(correction=prompt_tokens - p.counted)
            if p.digest == digest
            else p._replace(
                holders=tuple(holder for holder in p.holders if holder.replica != evicted_from),
                shared=p.shared and not lost,
            )
            for p in self.points
        )
        return self._replace(points=points)


@lru_cache(maxsize=4096)
def _newest(holders: tuple[CachedOn, ...]) -> tuple[CachedOn, ...]:
    """The first `HOLDERS_PER_POOL` different holders of each pool."""
    kept: list[CachedOn] = []
    for holder in holders:
        if holder not in kept and sum(each.pool is holder.pool for each in kept) < HOLDERS_PER_POOL:
            kept.append(holder)
    return tuple(kept)


def _retained(ordered: list[Point]) -> Iterable[Point]:
    """The newest points, and for every conversation its head and the newest points of its latest holders."""
    found: dict[str, tuple[CachedOn, ...]] = {}
    for rank, point in enumerate(ordered):
        known = found.get(point.conversation)
        holders = found[point.conversation] = _newest((*(known or ()), *point.holders))
        if rank < RECENT_POINTS or known is None or len(holders) > len(known):
            yield point


def _limited(points: list[Point]) -> tuple[Point, ...]:
    """At most MAX_POINTS of these points, which are ordered from the newest to the oldest."""
    excess = len(points) - MAX_POINTS
    if excess > 0:
        heads = {point.conversation: point.digest for point in reversed(points)}
        others = [point for point in points[RECENT_POINTS:] if heads[point.conversation] != point.digest]
        dropped = {point.digest for point in others[-excess:]}
        points = [point for point in points if point.digest not in dropped]
    return tuple(points[:MAX_POINTS])


def _fields(point: Point) -> list[Any]:
    """The stored fields; the last two are omitted if both have their default."""
    holders = "".join(_LETTERS[pool] + replica for pool, replica in point.holders)
    cached = holders + _SHARED if point.shared else holders
    fields = [point.turn, point.digest, point.offset, point.tokens, point.counted, cached]
    return (
        [*fields, point.correction, point.conversation] if point.correction or point.conversation else fields
    )


def _point(
    turn: int,
    digest: str,
    offset: int,
    tokens: int,
    counted: int,
    cached: str,
    correction: int = 0,
    conversation: str = "",
) -> Point:
    """Raises ValueError or TypeError for invalid fields."""
    largest = max(turn, offset, tokens, counted, abs(correction))
    if min(turn, offset, tokens, counted) < 0 or largest > MAX_NUMBER:
        raise ValueError("a number is out of range")
    holders, shared = _cached(cached)
    return Point(
        int(turn),
        str(digest),
        int(offset),
        int(tokens),
        int(counted),
        holders,
        int(correction),
        str(conversation),
        shared,
    )


@lru_cache(maxsize=4096)
def _cached(text: str) -> tuple[tuple[CachedOn, ...], bool]:
    """The holders of a point, and whether it is shared. Raises ValueError or TypeError for an invalid text."""
    if not re.fullmatch(rf"(?:{_CACHED_ON})*{re.escape(_SHARED)}?", text):
        raise ValueError(f"{text!r} does not list replicas")
    holders = tuple(CachedOn(_POOLS[letter], replica) for letter, replica in re.findall(_CACHED_ON, text))
    return holders, text.endswith(_SHARED)


@dataclass(frozen=True, slots=True)
class Pointer:
    """Maps the prefix of a prompt up to its last boundary to the session whose turn stored the pointer.

    It also contains the point: when many sessions share a prefix, the record of the first one may already have
    dropped the point at which another one diverges.
    """

    session: SessionId
    point: Point

    def encode(self) -> bytes:
        """Serialize to a JSON array whose first item is the session id (the Lua lookup script relies on it)."""
        return orjson.dumps([self.session.text, Record((self.point,)).encode().decode()])

    @classmethod
    def decode(cls, raw: bytes) -> "Pointer | None":
        """Parse the stored form. Returns None for anything else."""
        try:
            text, record = orjson.loads(raw)
            session, points = SessionId.parse(text), Record.decode(record.encode()).points
        except (AttributeError, TypeError, ValueError):
            return None
        return cls(session, points[0]) if session and points else None


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The engine that holds an answer of the Responses API, and the turn that the answer belongs to."""

    pool: Pool
    url: str
    """The replica's base URL."""
    session: str = ""
    """The id of the session (`SessionId.text`); empty if the request was not a turn of one."""
    digest: str = ""
    """The digest of the turn's point in the session's record."""
    tokens: int = 0
    """The length of the prompt and the answer, without the token that ends the answer; 0 if unknown."""

    def encode(self) -> bytes:
        """Serialize to a JSON array."""
        return orjson.dumps([self.pool.value, self.url, self.session, self.digest, self.tokens])

    @classmethod
    def decode(cls, raw: bytes) -> "StoredResponse | None":
        """Parse the stored form. Returns None for anything else."""
        try:
            pool, url, session, digest, tokens = orjson.loads(raw)
            if not 0 <= tokens <= MAX_NUMBER:
                return None
            return cls(Pool(pool), str(url), str(session), str(digest), int(tokens))
        except (TypeError, ValueError):
            return None


def record_prefix(scope: Scope, tag: str) -> str:
    """The common prefix of the keys of a tag's records."""
    return f"dps:{{{scope.name}:{tag}}}:s:"


def record_key(scope: Scope, session: SessionId) -> str:
    """The key of a session's record."""
    return record_prefix(scope, session.tag) + session.text


def is_record_key(key: str) -> bool:
    """Whether `key` is the key of a record rather than of another entry."""
    return "}:s:" in key


def pointer_key(scope: Scope, tag: str, digest: str) -> str:
    """The key of the pointer for the digest of a prompt prefix that ends at a message boundary."""
    return f"dps:{{{scope.name}:{tag}}}:p:{digest}"


def response_key(scope: Scope, response_id: str) -> str:
    """The key of a stored response. It contains the id as a hash, and belongs to one tenant."""
    digest = hashlib.blake2b(response_id.encode(errors="replace"), digest_size=16).hexdigest()
    return f"dps:{{{scope.name}:{digest[:TAG_CHARS]}}}:r:{digest}"
