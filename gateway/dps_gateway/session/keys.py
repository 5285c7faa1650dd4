"""The names under which session state is stored, and the pointer from a history to its session. Pure."""

from dataclasses import dataclass

import orjson

from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.record import Point, Record


def record_prefix(scope: Scope, tag: str) -> str:
    """What the keys of a tag's records start with. The braces keep a tag in one Redis Cluster slot."""
    return f"dps:{{{scope.name}:{tag}}}:s:"


def record_key(scope: Scope, session: SessionId) -> str:
    """The key of a session's record."""
    return record_prefix(scope, session.tag) + session.text


def is_record_key(key: str) -> bool:
    """Whether a key is a record's; otherwise it is a pointer's."""
    return "}:s:" in key


def pointer_key(scope: Scope, tag: str, digest: str) -> str:
    """The key of the pointer that the digest of a message boundary leads to."""
    return f"dps:{{{scope.name}:{tag}}}:p:{digest}"


@dataclass(frozen=True, slots=True)
class Pointer:
    """From a prompt's last boundary to the session that wrote it.

    It carries the point as well: when many sessions share a beginning, the record of the one that began has
    long forgotten the point at which another now leaves it.
    """

    session: SessionId
    point: Point

    def encode(self) -> bytes:
        """The stored form: a JSON array that starts with the session's id (the look-up script relies on it)."""
        return orjson.dumps([self.session.text, Record((self.point,)).encode().decode()])

    @classmethod
    def decode(cls, raw: bytes) -> "Pointer | None":
        """Read the stored form, or None for anything else."""
        try:
            text, record = orjson.loads(raw)
            session, points = SessionId.parse(text), Record.decode(record.encode()).points
        except (AttributeError, TypeError, ValueError):
            return None
        return cls(session, points[0]) if session and points else None
