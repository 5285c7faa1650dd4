"""What an engine says it used, read from its answer without parsing more than the end of it. Pure."""

import re
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

MAX_HELD_BYTES: Final = 1024 * 1024
"""An event longer than this is passed on in pieces."""

_DONE: Final = b"data: [DONE]"
_MARKS: Final = {
    "openai": re.compile(rb'"usage":\s*\{'),
    "native": re.compile(rb'"meta_info":\s*\{'),
}
_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\s*\]')

Dialect = Literal["openai", "native"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer, as the engine reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    finish_reason: str | None = None
    response_id: str | None = None
    model: str | None = None


def read_usage(document: bytes, dialect: Dialect) -> Usage | None:
    """The usage in a JSON answer, or None if there is none to be read."""
    try:
        data: Any = orjson.loads(document)
    except orjson.JSONDecodeError:
        return None
    return _openai(data) if dialect == "openai" else _native(data)


def _openai(data: Any) -> Usage | None:
    usage = data.get("usage") if isinstance(data, dict) else None
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    choices = data.get("choices") or [{}]
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=details.get("cached_tokens"),
        finish_reason=choices[0].get("finish_reason"),
        response_id=data.get("id"),
        model=data.get("model"),
    )


def _native(data: Any) -> Usage | None:
    """SGLang's /generate; a batch or several samples are a list, and have no single length."""
    meta = data.get("meta_info") if isinstance(data, dict) else None
    if not isinstance(meta, dict):
        return None
    finish = meta.get("finish_reason")
    return Usage(
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        completion_tokens=int(meta.get("completion_tokens") or 0),
        cached_tokens=meta.get("cached_tokens"),
        finish_reason=finish.get("type") if isinstance(finish, dict) else None,
        response_id=meta.get("id"),
    )


class EventRelay:
    """Server-sent events on their way to the client: whole events, byte for byte.

    Only the usage that the gateway asked for, and the client did not (`hide_usage`), is taken out.
    """

    def __init__(self, dialect: Dialect, *, hide_usage: bool) -> None:
        self._dialect = dialect
        self._mark = _MARKS[dialect]
        self._hide = hide_usage
        self._held = b""
        self._usage_event = b""

    @property
    def usage(self) -> Usage | None:
        """The last usage that has passed."""
        return read_usage(self._usage_event, self._dialect) if self._usage_event else None

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """(what may be passed on now, the closing [DONE] and what follows it, once it is there)."""
        data = self._held + chunk if self._held else chunk
        separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
        end = data.rfind(separator) + len(separator)
        if end < len(separator):
            end = len(data) if len(data) > MAX_HELD_BYTES else 0
        events, self._held = data[:end], data[end:]
        if self._mark.search(events):
            events = self._take_usage(events, separator)
        done = events.rfind(_DONE)
        return (events, b"") if done == -1 else (events[:done], events[done:])

    def finish(self) -> bytes:
        """What is left when the stream has ended."""
        rest, self._held = self._held, b""
        return rest

    def _take_usage(self, events: bytes, separator: bytes) -> bytes:
        kept = []
        for event in events.split(separator):
            if self._mark.search(event):
                self._usage_event = event.strip().removeprefix(b"data:")
                if self._hide and _NO_CHOICES.search(event):
                    continue
            kept.append(event)
        return separator.join(kept)
