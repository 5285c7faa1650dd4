"""The subset of HTTP/1.1 that the load generator and the fake engine require, with minimal overhead."""

from dataclasses import dataclass
from typing import Final

_END_OF_HEAD: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"


class WireError(Exception):
    """The peer sent invalid or unsupported HTTP, or an unexpected response."""


def content_length(head: bytes) -> int | None:
    """The Content-Length in a message head, or None if there is none."""
    lowered = head.lower()
    start = lowered.find(b"\r\ncontent-length:")
    if start < 0:
        return None
    end = lowered.find(b"\r\n", start + 17)
    return int(lowered[start + 17 : end if end >= 0 else None])


@dataclass(frozen=True)
class Request:
    """A request received by the fake engine."""

    method: str
    path: str
    body: bytes


class RequestReader:
    """Splits a connection's bytes into requests. Chunked request bodies are not supported."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = 0

    def feed(self, data: bytes) -> list[Request]:
        """Add received bytes and return the requests that are now complete.

        Raises WireError if a request has a chunked body.
        """
        self._buffer += data
        complete = []
        while len(self._buffer) >= self._needed and (request := self._cut()) is not None:
            complete.append(request)
        return complete

    def _cut(self) -> Request | None:
        end = self._buffer.find(_END_OF_HEAD)
        if end < 0:
            return None
        head = bytes(self._buffer[:end])
        if b"\r\ntransfer-encoding:" in head.lower():
            raise WireError("a router sent a chunked request body")
        body = end + len(_END_OF_HEAD)
        self._needed = body + (content_length(head) or 0)
        if len(self._buffer) < self._needed:
            return None
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        request = Request(method, path, bytes(self._buffer[body : self._needed]))
        del self._buffer[: self._needed]
        self._needed = 0
        return request


class ResponseReader:
    """Reads the responses of a connection that has at most one request in flight.

    Chunked bodies are decoded only when complete. The bytes that end a chunked body do not occur within the fake
    engine's answers, so the body is complete when they appear.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._body = 0
        self._needed: int | None = None

    def feed(self, data: bytes) -> bytes | None:
        """Add received bytes. Returns the body once it is complete, otherwise None.

        Raises WireError if the status is not 200, or if the length of the body is unknown.
        """
        self._buffer += data
        if not self._body and not self._read_head():
            return None
        if self._needed is None:
            if not self._buffer.endswith(_LAST_CHUNK):
                return None
            body = dechunk(bytes(self._buffer[self._body :]))
        elif len(self._buffer) < self._needed:
            return None
        elif len(self._buffer) > self._needed:
            raise WireError("the response is longer than its Content-Length")
        else:
            body = bytes(self._buffer[self._body :])
        self._buffer.clear()
        self._body = 0
        return body

    def _read_head(self) -> bool:
        end = self._buffer.find(_END_OF_HEAD)
        if end < 0:
            return False
        head = bytes(self._buffer[:end])
        if head[9:12] != b"200":
            raise WireError(f"the status is not 200: {bytes(self._buffer[:400])!r}")
        self._body = end + len(_END_OF_HEAD)
        length = content_length(head)
        if length is None and b"chunked" not in head.lower():
            raise WireError(f"a response of unknown length: {head!r}")
        self._needed = None if length is None else self._body + length
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
