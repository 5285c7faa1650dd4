"""The entries of the session store: their keys, and the values other than records. This module performs no I/O.

The keys of a session's record and of the pointers to it contain the same hash tag (in braces), so that Redis Cluster
keeps them in one slot.
"""

import hashlib
from dataclasses import dataclass

import orjson

from dps_gateway.pool import Pool
from dps_gateway.session.identity import TAG_CHARS, Scope, SessionId
from dps_gateway.session.record import MAX_NUMBER, Point, Record


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
