"""Relaying server-sent events from an engine to a client. This module performs no I/O."""

import re
from dataclasses import replace
from typing import Final

from dps_gateway.engine.dialect import AnswerFormat, Usage, read_usage

MAX_HELD_BYTES: Final = 1024 * 1024
"""An incomplete event longer than this is forwarded in pieces."""

_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\s*\]')


class EventRelay:
    """Forwards whole events byte for byte and records the most recent usage that they report.

    With `hide_usage`, events that carry only usage are dropped, because the gateway requested them, not the client.
    """

    def __init__(self, answer_format: AnswerFormat, *, hide_usage: bool) -> None:
        self._format = answer_format
        self._hide = hide_usage
        self._held = b""
        self._first_usage = b""
        self._last_usage = b""

    @property
    def usage(self) -> Usage | None:
        """The most recent usage in the stream, with the prompt's tokens from the first one if it has none itself."""
        last = read_usage(self._last_usage, self._format) if self._last_usage else None
        if last is None or last.prompt_tokens:
            return last
        first = read_usage(self._first_usage, self._format) or last
        return replace(first, completion_tokens=last.completion_tokens, finish_reason=last.finish_reason)

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Returns the complete events to forward now, and the closing event with everything after it."""
        data = self._held + chunk if self._held else chunk
        separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
        end = data.rfind(separator) + len(separator)
        if end < len(separator):
            end = len(data) if len(data) > MAX_HELD_BYTES else 0
        events, self._held = data[:end], data[end:]
        if self._format.usage_marker.search(events):
            events = self._take_usage(events, separator)
        done = events.rfind(self._format.closing)
        # Generated text may contain the same words, but never at the start of a line.
        if done == -1 or (done > 0 and events[done - 1 : done] != b"\n"):
            return events, b""
        return events[:done], events[done:]

    def finish(self) -> bytes:
        """The incomplete event, if any, that was held back when the stream ended."""
        rest, self._held = self._held, b""
        return rest

    def _take_usage(self, events: bytes, separator: bytes) -> bytes:
        kept = []
        for event in events.split(separator):
            if self._format.usage_marker.search(event):
                self._last_usage = event.partition(b"data:")[2]
                self._first_usage = self._first_usage or self._last_usage
                if self._hide and _NO_CHOICES.search(event):
                    continue
            kept.append(event)
        return separator.join(kept)
