"""Storage keys of session state, and the pointer from a prompt prefix to its session. Pure."""

from dataclasses import dataclass

import orjson

from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.record import Point, Record


def record_prefix(scope: Scope, tag: str) -> str:
    """The common prefix of a tag's record keys. The braces (a hash tag) keep them in one Redis Cluster slot."""
    return f"dps:{{{scope.name}:{tag}}}:s:"


def record_key(scope: Scope, session: SessionId) -> str:
    """The key of a session's record."""
    return record_prefix(scope, session.tag) + session.text


def is_record_key(key: str) -> bool:
    """Whether `key` is the key of a record rather than of a pointer."""
    return "}:s:" in key


def pointer_key(scope: Scope, tag: str, digest: str) -> str:
    """The key of the pointer for the digest of a prompt prefix that ends at a message boundary."""
    return f"dps:{{{scope.name}:{tag}}}:p:{digest}"


@dataclass(frozen=True, slots=True)
class Pointer:
    """Maps the prefix of a prompt up to its last boundary to the session that wrote it.

    It contains the point as well: when many sessions share a prefix, the record of the first one may already have
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
