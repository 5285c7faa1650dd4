"""Continuing a stream whose engine has failed with the answer of another engine. This module performs no I/O.

The other engine generates the whole answer again. If it begins with exactly what the client has received, the client
receives the rest.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

import orjson

from dps_gateway.engine.stream_content import Different, Part, StreamContent

MAX_CHARS: Final = 1024 * 1024
"""Streams with a longer text are not continued, because it would take too much memory."""

MAX_UNREAD_BYTES: Final = 128 * 1024
"""Size of events from which only their text is kept. They are not parsed earlier, because parsing takes about 5 µs per
event, and most streams are shorter and do not fail."""

_SEPARATOR: Final = re.compile(rb"(\r?\n\r?\n)")
_ID_FIELDS: Final = ("id", "created")

Text = tuple[str, str]
"""A field and its text, as in `Part`."""


class Received:
    """What a client has received of a stream."""

    def __init__(self, content: StreamContent) -> None:
        self._content = content
        self._read = content.reader()
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._texts: list[Text] = []
        self._ids: dict[str, Any] | None = None
        """The fields of the first event that identify the answer; None before the first event."""
        self._comparable = True

    def add(self, events: bytes) -> None:
        """Record events that the client receives."""
        if self._comparable and events:
            self._unread.append(events)
            self._unread_bytes += len(events)
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._read_events()

    def continuation(self) -> "Continuation | None":
        """The continuation of the stream with another answer. None if it cannot be compared, or is too long."""
        self._read_events()
        return Continuation(self._content, self._texts, self._ids) if self._comparable else None

    def _read_events(self) -> None:
        unread = b"".join(self._unread)
        self._unread, self._unread_bytes = [], 0
        try:
            self._texts = _joined(chain(self._texts, self._texts_in(unread)))
        except Different:
            self._comparable = False
        if not self._comparable or sum(len(text) for _, text in self._texts) > MAX_CHARS:
            self._comparable, self._texts = False, []

    def _texts_in(self, events: bytes) -> Iterator[Text]:
        for event, _ in _split(events):
            document = _document(event)
            if document is not None:
                if self._ids is None:
                    identified = self._content.identified(document)
                    self._ids = {name: identified[name] for name in _ID_FIELDS if name in identified}
                for part in self._read(document):
                    yield part.field, part.text


class Continuation:
    """The part of another answer that the client has not received."""

    def __init__(
        self, content: StreamContent, received: Sequence[Text], ids: Mapping[str, Any] | None
    ) -> None:
        """`ids` are the fields that identify the first answer, or None if the client has received no event."""
        self._content = content
        self._read = content.reader()
        self._received = received
        self._ids = ids or {}
        self._next = 0
        """The index of the received text with which the next part is compared."""
        self._compared = 0
        """The number of its characters that have been compared."""
        self._forwards = ids is None
        """Whether an event with something new has been found. All events after it are new."""

    @property
    def caught_up(self) -> bool:
        """Whether the answer contains everything that the client has received."""
        return self._next == len(self._received)

    def feed(self, events: bytes) -> bytes:
        """The events to forward, with the ids of the first answer.

        Raises Different if the answer is not the same as the first one, in which case nothing has been forwarded.
        """
        return b"".join(self._new_part(event, separator) for event, separator in _split(events))

    def _new_part(self, event: bytes, separator: bytes) -> bytes:
        try:
            document = _document(event)
        except Different:
            if self._forwards:
                return event + separator
            raise
        if not self._forwards:
            left = [(part, self._left(part)) for part in self._read(document)] if document else []
            self._forwards = any(text for _, text in left)
            if not self._forwards:
                return b""
            for part, text in left:
                if text != part.text:
                    part.cut(text)
        return (_with_document(event, self._identified(document)) if document else event) + separator

    def _left(self, part: Part) -> str:
        """What the client has not received of a part. Raises Different."""
        if self.caught_up:
            return part.text
        field, text = self._received[self._next]
        common = text[self._compared : self._compared + len(part.text)]
        if part.field != field or not part.text.startswith(common) or (part.whole and part.text != text):
            raise Different(f"the answers differ in {part.field}")
        self._compared += len(common)
        if self._compared == len(text):
            self._next, self._compared = self._next + 1, 0
        left = part.text[len(common) :]
        if left and not self.caught_up:
            raise Different(f"the answers differ in {part.field}")
        return left

    def _identified(self, document: dict[str, Any]) -> dict[str, Any]:
        identified = self._content.identified(document)
        identified.update({name: value for name, value in self._ids.items() if name in identified})
        return document


def _joined(texts: Iterable[Text]) -> list[Text]:
    """The texts, with consecutive ones of the same field joined."""
    return [(field, "".join(text for _, text in group)) for field, group in groupby(texts, key=itemgetter(0))]


def _split(events: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Events and the separators after them. The separator after an incomplete event is empty."""
    pieces = _SEPARATOR.split(events)
    for event, separator in zip(pieces[::2], [*pieces[1::2], b""], strict=True):
        if event:
            yield event, separator


def _document(event: bytes) -> dict[str, Any] | None:
    """The JSON object in an event; None if the event has no data. Raises Different if it has other data."""
    data = [line for line in event.splitlines() if line.startswith(b"data:")]
    if not data:
        return None
    try:
        document = orjson.loads(data[0].removeprefix(b"data:"))
    except orjson.JSONDecodeError as error:
        raise Different("an event is not JSON") from error
    if len(data) > 1 or not isinstance(document, dict):
        raise Different("an event is not a JSON object")
    return document


def _with_document(event: bytes, document: Mapping[str, Any]) -> bytes:
    """The event with another JSON object as its data."""
    lines = (
        b"data: " + orjson.dumps(document) if line.startswith(b"data:") else line
        for line in event.splitlines()
    )
    return b"\n".join(lines)
