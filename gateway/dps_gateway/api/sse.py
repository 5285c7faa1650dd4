"""Relaying server-sent events from an engine to a client. This module performs no I/O."""

import re
from typing import Final

from dps_gateway.engine.dialect import AnswerFormat, Usage, read_usage

MAX_HELD_BYTES: Final = 1024 * 1024
"""An incomplete event longer than this is forwarded in pieces."""

_DONE: Final = b"data: [DONE]"
_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\s*\]')


class EventRelay:
    """Forwards whole events byte for byte and records the most recent usage that they report.

    With `hide_usage`, events that carry only usage are dropped, because the gateway requested them, not the client.
    """

    def __init__(self, answer_format: AnswerFormat, *, hide_usage: bool) -> None:
        self._format = answer_format
        self._hide = hide_usage
        self._held = b""
        self._usage_event = b""

    @property
    def usage(self) -> Usage | None:
        """The most recent usage in the stream."""
        return read_usage(self._usage_event, self._format) if self._usage_event else None

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Returns the complete events to forward now, and the closing [DONE] event with everything after it."""
        data = self._held + chunk if self._held else chunk
        separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
        end = data.rfind(separator) + len(separator)
        if end < len(separator):
            end = len(data) if len(data) > MAX_HELD_BYTES else 0
        events, self._held = data[:end], data[end:]
        if self._format.usage_marker.search(events):
            events = self._take_usage(events, separator)
        done = events.rfind(_DONE)
        return (events, b"") if done == -1 else (events[:done], events[done:])

    def finish(self) -> bytes:
        """The incomplete event, if any, that was held back when the stream ended."""
        rest, self._held = self._held, b""
        return rest

    def _take_usage(self, events: bytes, separator: bytes) -> bytes:
        kept = []
        for event in events.split(separator):
            if self._format.usage_marker.search(event):
                self._usage_event = event.strip().removeprefix(b"data:")
                if self._hide and _NO_CHOICES.search(event):
                    continue
            kept.append(event)
        return separator.join(kept)
