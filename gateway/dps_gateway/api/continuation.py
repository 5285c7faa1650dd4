"""Continuing a stream whose engine has failed on another engine. This module performs no I/O.

The other engine receives the text that the client has as the beginning of its answer, and generates the rest.
"""

from dataclasses import replace
from typing import Any, Final

import orjson

from dps_gateway.api.endpoints.base import DeliveredText, NotContinuable, TextEndpoint
from dps_gateway.api.sse import document_of, split
from dps_gateway.engine.usage import Usage, token_count

MAX_CHARS: Final = 1024 * 1024
"""Streams with a longer text are not continued, because it would take too much memory."""

MAX_UNREAD_BYTES: Final = 128 * 1024
"""Size of events from which only their text is kept. They are not parsed earlier, because parsing takes about 5 µs per
event, and most streams are shorter and do not fail."""


class Recorder:
    """Records what a client receives of a stream."""

    def __init__(self, endpoint: TextEndpoint) -> None:
        self._endpoint = endpoint
        self._received = DeliveredText()
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._plain = True

    def add(self, events: bytes) -> None:
        """Record events that the client receives."""
        if self._plain and events:
            self._unread.append(events)
            self._unread_bytes += len(events)
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._read()

    def received(self) -> DeliveredText:
        """What the client has received. Raises NotContinuable if it is not one text, or a very long one."""
        self._read()
        if not self._plain:
            raise NotContinuable("the stream contains more than one plain text, or a very long one")
        return self._received

    def _read(self) -> None:
        unread = b"".join(self._unread)
        self._unread, self._unread_bytes = [], 0
        try:
            for event, _ in split(unread):
                document = document_of(event)
                if document is not None:
                    self._endpoint.read(document, self._received)
        except NotContinuable:
            self._plain = False
        if not self._plain or len(self._received.text) > MAX_CHARS:
            self._plain, self._received = False, DeliveredText()


class Continuation:
    """The rest of an answer, which another engine generates."""

    def __init__(
        self, endpoint: TextEndpoint, received: DeliveredText, tokens: int, prompt_tokens: int | None
    ) -> None:
        """`tokens` is the length of the received text, `prompt_tokens` that of the client's prompt, if it is known."""
        self.endpoint = endpoint
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self.received = received

    def feed(self, events: bytes) -> bytes:
        """The events to forward instead of these events of the other engine."""
        return b"".join(self._joined(event, separator) for event, separator in split(events))

    def usage(self, usage: Usage) -> Usage:
        """The usage of the whole answer, given that of the other engine, whose prompt includes the received text."""
        if not self._tokens:
            return usage
        prompt = self._prompt_tokens or max(0, usage.prompt_tokens - self._tokens)
        cached = None if usage.cached_tokens is None else min(usage.cached_tokens, prompt)
        fetched = None if usage.fetched_tokens is None else min(usage.fetched_tokens, cached or 0)
        completion = usage.completion_tokens + self._tokens
        return replace(
            usage,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            fetched_tokens=fetched,
        )

    def _count(self, counts: dict[str, Any]) -> None:
        """Change token counts in an event of the other engine to those of the whole answer."""
        usage = Usage(
            token_count(counts.get("prompt_tokens")) or 0, token_count(counts.get("completion_tokens")) or 0
        )
        whole = self.usage(usage)
        counts.update(prompt_tokens=whole.prompt_tokens, completion_tokens=whole.completion_tokens)
        details = counts.get("prompt_tokens_details")
        for owner in (counts, details if isinstance(details, dict) else {}):
            cached = token_count(owner.get("cached_tokens"))
            if cached is not None:
                owner["cached_tokens"] = min(cached, whole.prompt_tokens)

    def _joined(self, event: bytes, separator: bytes) -> bytes:
        try:
            document = document_of(event)
            forwarded = document is None or self.endpoint.join(document, self.received, self._count)
        except NotContinuable:
            return event + separator
        if not forwarded:
            return b""
        return (event if document is None else b"data: " + orjson.dumps(document)) + separator
