"""Storage keys of session state, and the pointer from a prompt prefix to its session. This module performs no I/O."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import orjson

from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.record import Point, Record
from dps_gateway.session.stored_responses import StoredResponse

MAX_VALUE_BYTES: Final = 16 * 1024
"""Maximum size of a stored value, in bytes. The largest record takes about 4 KB."""

_KEY: Final = re.compile(
    r"dps:\{(?P<scope>[0-9a-f]+):(?P<tag>[0-9a-f]+)\}:(?:s:(?P<session>dps-[0-9a-f]+)|p:[A-Za-z0-9_-]{1,64}|(?P<response>r:[0-9a-f]{32}))"
)


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


def is_valid_entry(scopes: Collection[str], key: str, value: bytes) -> bool:
    """Whether `key` is in one of these scopes (`Scope.name`) and `value` is a valid value for that key."""
    match = _KEY.fullmatch(key)
    return match is not None and match["scope"] in scopes and is_valid_value(key, value)


def is_valid_value(key: str, value: bytes) -> bool:
    """Whether `value` is a valid value for `key`, in any scope."""
    match = _KEY.fullmatch(key)
    if match is None or len(value) > MAX_VALUE_BYTES:
        return False
    if match["response"] is not None:
        return StoredResponse.decode(value) is not None
    if match["session"] is None:
        pointer = Pointer.decode(value)
        return pointer is not None and pointer.session.tag == match["tag"]
    session = SessionId.parse(match["session"])
    try:
        return session is not None and session.tag == match["tag"] and bool(Record.decode(value).points)
    except ValueError:
        return False
