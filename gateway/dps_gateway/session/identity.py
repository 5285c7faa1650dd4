"""Identify a request's session from headers and body fields that clients already send. This module performs no I/O.

Session keys are an ordered list of sources, each `header:NAME` or `body:FIELD[.FIELD]`. The first source with a
valid value wins. Authorization and network addresses never identify a session, because one API key or one proxy
serves many sessions.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from multidict import istr

MAX_SESSION_ID_CHARS: Final = 255

DEFAULT_SESSION_KEYS: Final = (
    "header:x-session-id",
    "header:x-claude-code-session-id",
    "header:session-id",
    "header:session_id",
    "header:x-opencode-session",
    "header:x-session-affinity",
    "header:x-amp-thread-id",
    "header:x-dynamo-session-id",
    "header:x-litellm-session-id",
    "header:x-bf-session-id",
    "header:x-grok-conv-id",
    "header:agent-session-id",
    "header:x-conversation-id",
    "header:x-thread-id",
    "body:prompt_cache_key",
    "body:conversation",
    "body:previous_response_id",
    "body:metadata.session_id",
)

FORBIDDEN_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
_OPAQUE_PREFIX: Final = "dps-"
_OPAQUE_CHARS: Final = frozenset("0123456789abcdef")
TAG_CHARS: Final = 8
_REST_CHARS: Final = 24


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A request header, or a path in the JSON body, that may contain the session id."""

    header: istr | None = None
    path: tuple[str, ...] = ()

    def value(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Any:
        """The value in a request, or None."""
        if self.header is not None:
            return headers.get(self.header)
        value: Any = body
        for part in self.path:
            value = value.get(part) if isinstance(value, dict) else None
        # The Responses API allows conversation: {"id": …}.
        return value.get("id") if isinstance(value, dict) else value


@lru_cache(maxsize=256)
def parse_session_key(text: str) -> SessionKey:
    """Parse `header:NAME` or `body:FIELD[.FIELD]`. Raises ValueError, stating the expected form, for other text."""
    kind, _, name = text.partition(":")
    if kind == "header" and name:
        if name.lower() in FORBIDDEN_HEADERS:
            raise ValueError(f"'{text}' must not identify a session: many sessions share one credential")
        return SessionKey(header=istr(name.lower()))
    if kind == "body" and name and all(name.split(".")):
        return SessionKey(path=tuple(name.split(".")))
    raise ValueError(f"'{text}' is not a session key: write header:NAME or body:FIELD")


def client_session_id(
    keys: tuple[SessionKey, ...], headers: Mapping[str, str], body: Mapping[str, Any]
) -> str | None:
    """The session id that the client sent, or None. Empty, overlong and non-string values are ignored."""
    for key in keys:
        value = key.value(headers, body)
        if isinstance(value, str) and 0 < len(value) <= MAX_SESSION_ID_CHARS and is_text(value):
            return value
    return None


def is_text(value: str) -> bool:
    """Whether `value` is valid Unicode. aiohttp decodes header bytes that are not valid UTF-8 to surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _hex_digest(*parts: bytes, size: int) -> str:
    framed = b"".join(len(part).to_bytes(4) + part for part in parts)
    return hashlib.blake2b(framed, digest_size=20).hexdigest()[:size]


@dataclass(frozen=True, slots=True)
class Scope:
    """The namespace of one tenant's sessions with one model in a shared store."""

    name: str

    @classmethod
    def of(cls, model: str, tenant: str, router: str = "") -> "Scope":
        """router: separates gateways that share a store and serve models of the same name; see `session.scope`."""
        parts = [model.encode(), tenant.encode(), *([router.encode()] if router else [])]
        return cls(_hex_digest(b"scope", *parts, size=10))


@dataclass(frozen=True, slots=True)
class SessionId:
    """An opaque session id (header `x-dps-session`). It contains the client's id, if any, only as a hash.

    The first characters are a tag. Keys with the same tag share a Redis Cluster slot.
    """

    text: str

    @property
    def tag(self) -> str:
        return self.text[len(_OPAQUE_PREFIX) :][:TAG_CHARS]

    @classmethod
    def of_client(cls, scope: Scope, client_id: str) -> "SessionId":
        """The session for a client's id. An opaque id from an earlier response is used unchanged."""
        opaque = cls.parse(client_id)
        if opaque is not None:
            return opaque
        return cls(
            _OPAQUE_PREFIX
            + _hex_digest(b"client", scope.name.encode(), client_id.encode(), size=TAG_CHARS + _REST_CHARS)
        )

    @classmethod
    def of_history(cls, tag: str, digest: bytes, parent: "SessionId | None" = None) -> "SessionId":
        """The id of a session without a client id, derived from its first prompt and, for a fork, its parent.

        The id is deterministic: a retry, another gateway replica and a restarted one derive the same id.
        """
        origin = parent.text.encode() if parent else b""
        return cls(_OPAQUE_PREFIX + tag + _hex_digest(b"history", origin, digest, size=_REST_CHARS))

    @classmethod
    def parse(cls, text: str) -> "SessionId | None":
        """The id if `text` is a well-formed opaque id, else None."""
        rest = text.removeprefix(_OPAQUE_PREFIX)
        if rest != text and len(rest) == TAG_CHARS + _REST_CHARS and _OPAQUE_CHARS.issuperset(rest):
            return cls(text)
        return None


@lru_cache(maxsize=4096)
def history_tag(root_digest: bytes) -> str:
    """The tag of all sessions that start with the same first message."""
    return _hex_digest(b"tag", root_digest, size=TAG_CHARS)
