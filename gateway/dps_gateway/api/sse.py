"""Relaying server-sent events from an engine to a client. This module performs no I/O."""

import re
from dataclasses import replace
from typing import Final

from dps_gateway.engine.dialect import AnswerFormat, RequestedByGateway, Usage, read_usage, total_usage
from dps_gateway.engine.sources import SOURCES, read_fetched, without_sources

MAX_HELD_BYTES: Final = 1024 * 1024
"""An incomplete event longer than this is forwarded in pieces."""

_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\s*\]')


def _last_line_with(events: bytes, start: bytes) -> int:
    """The position of the last line that begins with `start`; -1 if there is none.

    Generated text may contain the same words, but never at the start of a line.
    """
    at = events.rfind(start)
    while at > 0 and events[at - 1 : at] != b"\n":
        at = events.rfind(start, 0, at)
    return at


class EventRelay:
    """Forwards whole events byte for byte and records the most recent usage that they report.

    Usage and sources that only the gateway has `requested` are removed, as are events that contain nothing else.
    """

    def __init__(self, answer_format: AnswerFormat, requested: RequestedByGateway) -> None:
        self._format = answer_format
        self._requested = requested
        self._held = b""
        self._sources = b""
        self._first_usage = b""
        self._last_usage = b""
        self._parts: dict[bytes, Usage] = {}
        """The most recent usage of each of several answers, by its number."""
        self.count = 0
        """The number of complete events so far."""

    @property
    def usage(self) -> Usage | None:
        """The most recent usage in the stream, or the sum over several answers.

        If it has no prompt tokens, they are taken from the first usage.
        """
        if len(self._parts) > 1:
            return total_usage(list(self._parts.values()))
        last = read_usage(self._last_usage, self._format) if self._last_usage else None
        if last is None:
            return None
        if self._sources:
            last = replace(last, fetched_tokens=read_fetched(self._sources))
        if last.prompt_tokens:
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
        self.count += events.count(separator)
        if self._format.usage_marker.search(events):
            events = self._take_usage(events, separator)
        done = max(_last_line_with(events, closing) for closing in self._format.closing)
        return (events, b"") if done == -1 else (events[:done], events[done:])

    def finish(self) -> bytes:
        """The incomplete event, if any, that was held back when the stream ended."""
        rest, self._held = self._held, b""
        return rest

    def _take_usage(self, events: bytes, separator: bytes) -> bytes:
        kept = []
        for event in events.split(separator):
            if self._format.usage_marker.search(event):
                event = self._record(event)
                if not event:
                    continue
            kept.append(event)
        return separator.join(kept)

    def _record(self, event: bytes) -> bytes:
        """Record an event with usage or sources. Returns what is left for the client; empty if nothing is."""
        if SOURCES.search(event):
            self._sources = event.partition(b"data:")[2]
            if self._requested.sources:
                event = without_sources(event)
                if _NO_CHOICES.search(event) and not self._format.usage_marker.search(event):
                    return b""
            return event
        self._last_usage = event.partition(b"data:")[2]
        self._first_usage = self._first_usage or self._last_usage
        marker = self._format.part_marker
        if marker is not None and (part := marker.search(event)) is not None:
            usage = read_usage(self._last_usage, self._format)
            if usage is not None:
                self._parts[part[1]] = usage
        return b"" if self._requested.usage and _NO_CHOICES.search(event) else event
