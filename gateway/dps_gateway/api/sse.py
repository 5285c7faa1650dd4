"""Server-sent events: splitting, reading and relaying them. This module performs no I/O."""

import re
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any, Final

import orjson

from dps_gateway.api.endpoints.base import Endpoint, NotContinuable
from dps_gateway.api.endpoints.openai import (
    DETAILS_MARKER,
    USAGE_FIELD,
    read_details,
    without_details,
)
from dps_gateway.api.outcome import FAILURE_MARKERS, Failure, failure_in, has_content
from dps_gateway.engine.usage import Usage, total_usage

MAX_HELD_BYTES: Final = 1024 * 1024
"""An incomplete event longer than this is forwarded in pieces."""

_SEPARATOR: Final = re.compile(rb"((?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r))")
"""An empty line after a line. Lines end with CR, LF or CRLF."""
_LF_SEPARATOR: Final = b"\n\n"
"""The only separator in events without CR. To split at it costs a small part of what the expression costs."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_FINISH_REASONS: Final = (b'"finish_reason":"', b'"finish_reason": "')
_FINISH_REASON: Final = re.compile(rb'"finish_reason": ?"(\w+)"')
_NO_CHOICES: Final = re.compile(rb'"choices":\s*\[\s*\]')


def split(events: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Events and the separators after them. The separator after an incomplete event is empty."""
    if b"\r" not in events:
        texts = events.split(_LF_SEPARATOR)
        separators = [_LF_SEPARATOR] * (len(texts) - 1)
    else:
        pieces = _SEPARATOR.split(events)
        texts, separators = pieces[::2], pieces[1::2]
    for event, separator in zip(texts, [*separators, b""], strict=True):
        if event:
            yield event, separator


def document_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object in an event; None if the event has no data. Raises NotContinuable if it has other data."""
    data = _data(event)
    if not data or data == b"[DONE]":
        return None
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise NotContinuable("an event is not JSON") from error
    if not isinstance(document, dict):
        raise NotContinuable("an event is not a JSON object")
    return document


def _data(event: bytes) -> bytes:
    """The data of an event; empty if it has none, because it is a comment, for example."""
    lines = event.removeprefix(_BYTE_ORDER_MARK).splitlines()
    return b"\n".join(line.removeprefix(b"data:") for line in lines if line.startswith(b"data:")).strip()


def beginning(events: bytes) -> Failure | bool:
    """Whether these first bytes of a stream contain content or its end, or the failure that it begins with."""
    for event, separator in split(events):
        if not separator:
            return len(event) > MAX_HELD_BYTES
        data = _data(event)
        if (failure := failure_in(data)) is not None:
            return failure
        try:
            if data and (data == b"[DONE]" or has_content(orjson.loads(data))):
                return True
        except orjson.JSONDecodeError:
            return True
    return False


def _last_line_with(events: bytes, start: bytes) -> int:
    """The position of the last line that begins with `start`; -1 if there is none.

    Generated text may contain the same words, but never at the start of a line.
    """
    at = events.rfind(start)
    while at > 0 and events[at - 1 : at] not in (b"\n", b"\r"):
        at = events.rfind(start, 0, at)
    return at


class EventRelay:
    """Forwards whole events byte for byte and records the most recent usage that they report.

    What engines report only because the gateway has `added` these fields to the request is removed, as are events that
    contain nothing else.
    """

    def __init__(self, endpoint: Endpoint, added: Set[str] = frozenset()) -> None:
        self._endpoint = endpoint
        self._removes_usage = USAGE_FIELD in added
        self._added = added
        self._incomplete = b""
        self._details = b""
        self._first_usage = b""
        self._last_usage = b""
        self._finish_reason: str | None = None
        self._closing = (*endpoint.closing, *(each.replace(b": ", b":", 1) for each in endpoint.closing))
        self._parts: dict[bytes, Usage] = {}
        """The most recent usage of each of several answers, by its number."""
        self.count = 0
        """The number of complete events so far."""
        self.within_event = False
        """Whether what has been forwarded ends within an event."""
        self.failure: Failure | None = None
        """The failure with which the engine has ended the stream. What follows it is not forwarded."""
        self.error = b""
        """The event that reports the failure to the client, if the engine has sent one."""

    @property
    def usage(self) -> Usage | None:
        """The most recent usage in the stream, or the sum over several answers.

        If it has no prompt tokens, they are taken from the first usage.
        """
        if len(self._parts) > 1:
            return total_usage(list(self._parts.values()))
        last = self._endpoint.read_usage(self._last_usage) if self._last_usage else None
        if last is None:
            return None
        if last.finish_reason is None and self._finish_reason is not None:
            last = replace(last, finish_reason=self._finish_reason)
        if self._details:
            fetched, verifications = read_details(self._details)
            fetched = last.fetched_tokens if fetched is None else fetched
            last = replace(last, fetched_tokens=fetched, verifications=verifications)
        if last.prompt_tokens:
            return last
        first = self._endpoint.read_usage(self._first_usage) or last
        return replace(first, completion_tokens=last.completion_tokens, finish_reason=last.finish_reason)

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Returns the complete events to forward now, and the closing event with everything after it."""
        data = self._incomplete + chunk if self._incomplete else chunk
        end = self._end_of_events(data)
        self.within_event = not end and (self.within_event or len(data) > MAX_HELD_BYTES)
        if not end and len(data) > MAX_HELD_BYTES:
            end = len(data)
        while data.startswith(b":", end) and (line_end := data.find(b"\n", end)) >= 0:
            end = line_end + 1  # a comment needs no empty line after it
        events, self._incomplete = data[:end], data[end:]
        if any(map(events.__contains__, FAILURE_MARKERS)):
            events = self._before_failure(events)
        if any(map(events.__contains__, _FINISH_REASONS)) and (found := _FINISH_REASON.search(events)):
            self._finish_reason = found[1].decode()
        if self._may_have_usage(events):
            events = self._take_usage(events)
        done = -1
        for closing in self._closing:
            if closing in events:
                done = max(done, _last_line_with(events, closing))
        return (events, b"") if done == -1 else (events[:done], events[done:])

    def _end_of_events(self, data: bytes) -> int:
        """The end of the last complete event; 0 if there is none. Counts the events."""
        if b"\r" not in data:
            self.count += data.count(_LF_SEPARATOR)
            return data.rfind(_LF_SEPARATOR) + 2 if _LF_SEPARATOR in data else 0
        ends = [separator.end() for separator in _SEPARATOR.finditer(data)]
        self.count += len(ends)
        return ends[-1] if ends else 0

    def _before_failure(self, events: bytes) -> bytes:
        """The events before the one that reports a failure; all of them if there is none."""
        kept = b""
        for event, separator in split(events):
            self.failure = failure_in(_data(event))
            if self.failure is not None:
                self._incomplete, self.error = b"", event + separator if self.failure.reported else b""
                break
            kept += event + separator
        return kept

    def finish(self) -> bytes:
        """The incomplete event, if any, that was held back when the stream ended."""
        rest, self._incomplete = self._incomplete, b""
        return rest

    def _may_have_usage(self, events: bytes) -> bool:
        return any(map(events.__contains__, self._endpoint.usage_markers))

    def _take_usage(self, events: bytes) -> bytes:
        first = min(at for each in self._endpoint.usage_markers if (at := events.find(each)) >= 0)
        before = events.rfind(_LF_SEPARATOR, 0, first)
        start = before + len(_LF_SEPARATOR) if before >= 0 else 0
        kept = [events[:start]]
        for event, separator in split(events[start:]):
            if self._may_have_usage(event):
                event = self._record(event)
            if event:
                kept += [event, separator]
        return b"".join(kept)

    def _record(self, event: bytes) -> bytes:
        """Record an event with usage or details. Returns what is left for the client; empty if nothing is."""
        if DETAILS_MARKER in event:
            self._details = event.partition(b"data:")[2]
            shorter = without_details(event, self._added)
            empty = _NO_CHOICES.search(shorter) and not self._may_have_usage(shorter)
            return b"" if empty and shorter != event else shorter
        self._last_usage = event.partition(b"data:")[2]
        self._first_usage = self._first_usage or self._last_usage
        marker = self._endpoint.part_marker
        if marker is not None and (part := marker.search(event)) is not None:
            usage = self._endpoint.read_usage(self._last_usage)
            if usage is not None:
                self._parts[part[1]] = usage
        return b"" if self._removes_usage and _NO_CHOICES.search(event) else event
