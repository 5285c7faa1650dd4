"""The subset of HTTP/1.1 that the load generator and the fake engine need.

HTTP libraries for Python take longer for a request than the router under test, and all of them would share a core.
"""

from dataclasses import dataclass
from typing import Final

_END_OF_HEAD: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"


class WireError(Exception):
    """The peer sent invalid or unsupported HTTP, or an unexpected response."""


@dataclass(frozen=True)
class Message:
    """A request or a response: its head without the last empty line, and its decoded body."""

    head: bytes
    body: bytes


class MessageReader:
    """Reads the messages of a connection, of which at most one is in flight.

    Chunked bodies are decoded only when complete. The bytes that end a chunked body do not occur within the fake
    engine's answers, so the body is complete when they appear.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head = b""
        self._length: int | None = None

    def feed(self, data: bytes) -> Message | None:
        """Add received bytes. Returns the message once it is complete, otherwise None.

        Raises WireError if the message is longer than its Content-Length, or its chunks are malformed.
        """
        self._buffer += data
        if not self._head and not self._read_head():
            return None
        if self._length is None:
            if not self._buffer.endswith(_LAST_CHUNK):
                return None
        elif len(self._buffer) < self._length:
            return None
        elif len(self._buffer) > self._length:
            raise WireError("the message is longer than its Content-Length")
        body = bytes(self._buffer)
        message = Message(self._head, dechunk(body) if self._length is None else body)
        self._buffer.clear()
        self._head = b""
        return message

    def _read_head(self) -> bool:
        end = self._buffer.find(_END_OF_HEAD)
        if end < 0:
            return False
        self._head = bytes(self._buffer[:end])
        del self._buffer[: end + len(_END_OF_HEAD)]
        lowered = self._head.lower()
        chunked = b"\r\ntransfer-encoding: chunked" in lowered
        _, _, length = lowered.partition(b"\r\ncontent-length:")
        self._length = None if chunked else int(length.split(b"\r\n", 1)[0] or 0)
        return True


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def dechunk(data: bytes) -> bytes:
    """Decode a complete chunked body (RFC 9112, section 7.1). Raises WireError if it is malformed."""
    parts: list[bytes] = []
    position = 0
    while True:
        end = data.find(b"\r\n", position)
        if end < 0:
            raise WireError("truncated chunked body")
        size = int(data[position:end], 16)
        start = end + 2
        position = start + size + 2
        if data[position - 2 : position] != b"\r\n":
            raise WireError("chunk size mismatch")
        if size == 0:
            return b"".join(parts)
        parts.append(data[start : start + size])
