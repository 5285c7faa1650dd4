"""One HTTP exchange with one replica: send the request, wait for the first bytes, stream the rest."""

import asyncio
import errno
import io
import ipaddress
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from dps_gateway.config import Timeouts
from dps_gateway.session.identity import is_text
from dps_gateway.upstream.deadline import Deadline
from dps_gateway.upstream.replica import Replica

log = logging.getLogger(__name__)

RETRYABLE_STATUSES: Final = frozenset({429, 502, 503, 504})
"""The engine, or a proxy in front of it, rejected the request without executing it."""

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
"""The longest answer that is held in memory. Longer ones, such as an endless body, count as broken."""

LOG_SECONDS: Final = 10.0

SALT_HEADER: Final = "x-dps-cache-salt"
"""Carries the salt of a request that has no field for it. Only engines with the plugin dps_sglang read the header."""

# fmt: off
_HOP_BY_HOP: Final = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})
_NOT_FORWARDED: Final = _HOP_BY_HOP | {
    "host", "content-length", "accept-encoding", "authorization", "x-api-key", "cookie", "expect",
    "traceparent", "tracestate", "baggage", "x-session-id", "x-request-id", SALT_HEADER,
}
# fmt: on
_LARGE_BODY_BYTES: Final = 1024 * 1024

DECODED: Final = frozenset({"gzip", "deflate", "br", "zstd"})
"""Content encodings of request bodies that aiohttp's server decompresses."""
_NOT_RETURNED: Final = _HOP_BY_HOP | {"content-length", "date", "server", "x-request-id"}


@dataclass(frozen=True, slots=True)
class Rejection:
    """The complete answer of a replica that rejected a request."""

    status: int
    body: bytes
    retry_after: str | None


@dataclass(frozen=True, slots=True)
class Outbound:
    """An HTTP request to a replica."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    """Headers that replace the client's."""
    streamed: bool
    """Whether the engine is expected to stream the answer, so that timeouts.firstByteSeconds applies."""
    buffered: bool
    """Whether an answer is read completely, or a stream to its first content, before any of it is relayed, so that the
    request can still be retried."""
    salt_header: str | None = None
    """The header with the tenant's cache salt, if only replicas that read it may serve the request."""
    generates: bool = True
    """Whether it occupies the engine's scheduler, whose limit of running requests then applies."""
    replica: str | None = None
    """The base URL of the only replica that can serve the request, in the pool of the decision. None if all can."""


class OutOfFiles(Exception):
    """This process cannot open another connection, which is not the replica's fault."""


class UpstreamFailed(Exception):
    """A replica did not begin to answer, or rejected the request. `kind` is a metric label."""

    def __init__(self, kind: str, message: str, rejection: Rejection | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.rejection = rejection

    @property
    def rejected(self) -> bool:
        """Whether the replica's status means that the request was not executed."""
        return self.rejection is not None

    @property
    def fatal(self) -> bool:
        """Whether the replica has crashed, closed the connection or stopped responding."""
        return self.kind in ("disconnect", "broken", "lost")


class UpstreamBroken(Exception):
    """A replica began to answer but did not finish."""

    def __init__(self, message: str, kind: str = "broken") -> None:
        super().__init__(message)
        self.kind = kind

    def as_failure(self) -> UpstreamFailed:
        """This failure as UpstreamFailed, for a request whose answer has not been relayed to the client yet."""
        return UpstreamFailed(self.kind, str(self))


class Answer:
    """An answer that a replica has begun: its status, its headers, and its body as a stream."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        first: bytes,
        timeouts: Timeouts,
        deadline: Deadline,
        begins_by: float,
    ) -> None:
        self._response = response
        self._idle_seconds = timeouts.idle_seconds
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._ends = math.inf
        """The end of the time for the answer, on the event loop's clock."""
        self._reading_since: float | None = None
        """When the wait for the next chunk has begun, on the event loop's clock; None if nothing waits for it."""
        self._watch: asyncio.TimerHandle | None = None
        self._relayed = False
        """Whether the pauses in it are limited."""
        self._chunks = self._read()
        self.begins_by = begins_by
        """The end of the time for the first content of a stream, on the event loop's clock."""
        self.first = first
        """The bytes that have been read so far, which `rest` does not repeat."""
        self.status = response.status
        self.streams = response.content_type == "text/event-stream"

    def headers(self) -> CIMultiDict[str]:
        """The headers to relay to the client."""
        return _without(self._response.headers, _NOT_RETURNED)

    async def rejection(self) -> Rejection:
        """The answer as a rejection. A truncated body is treated as empty."""
        try:
            body = await self.body()
        except UpstreamBroken:
            body = b""
        finally:
            self.close()
        return Rejection(self.status, body, self._response.headers.get("Retry-After"))

    def rest(self) -> AsyncIterator[bytes]:
        """The chunks after `first`.

        Raises UpstreamBroken as `read_on` does, and if the replica sends nothing for timeouts.idleSeconds.
        """
        self._relayed = True
        return self._chunks

    async def read_on(self) -> bool:
        """Add the next chunk to `first`. Returns False at the end of the answer.

        Raises UpstreamBroken if the replica closes the connection or does not finish by the deadline.
        """
        chunk = await anext(self._chunks, b"")
        self.first += chunk
        return bool(chunk)

    def refuse(self, status: int) -> None:
        """Treat the answer, which is a stream that begins with an error, as a refusal with this HTTP status."""
        self.status, self.streams = status, False

    async def _read(self) -> AsyncIterator[bytes]:
        content, loop = self._response.content, self._loop
        self._ends = loop.time() + self._deadline.left_seconds
        self._watch = loop.call_at(min(loop.time() + self._idle_seconds, self._ends), self._check)
        try:
            while True:
                self._reading_since = loop.time()
                chunk = await content.readany()
                self._reading_since = None
                if not chunk:
                    return
                yield chunk
                if loop.time() >= self._ends:
                    raise self._too_slow()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamBroken("the engine closed the connection before the answer was complete") from error
        finally:
            self._watch.cancel()

    def _check(self) -> None:
        """End the wait for the next chunk if it is too long.

        A single timer, which is set again when it expires, costs less than a timer for each chunk.
        """
        now, since = self._loop.time(), self._reading_since
        if since is None or (not self._relayed and now < self._ends):
            self._watch = self._loop.call_at(min(now + self._idle_seconds, self._ends), self._check)
        elif now < (limit := min(since + self._idle_seconds, self._ends)):
            self._watch = self._loop.call_at(limit, self._check)
        elif now >= self._ends:
            self._response.content.set_exception(self._too_slow())
        else:
            idle = UpstreamBroken(f"the engine sent nothing for {self._idle_seconds:g} s", "timeout")
            self._response.content.set_exception(idle)

    def _too_slow(self) -> UpstreamBroken:
        return UpstreamBroken(f"the answer took longer than {self._deadline.seconds:g} s", "timeout")

    async def body(self) -> bytes:
        """The complete body. Raises UpstreamBroken if the body is incomplete or longer than MAX_ANSWER_BYTES."""
        if self._response.content.at_eof():
            return self.first
        chunks, size = [self.first], len(self.first)
        async for chunk in self.rest():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise UpstreamBroken(f"the answer is longer than {MAX_ANSWER_BYTES} bytes", "too_long")
        return b"".join(chunks)

    def close(self) -> None:
        """Release the connection if the answer is complete; otherwise close it, which aborts the generation."""
        if self._watch is not None:
            self._watch.cancel()
        self._response.release() if self._response.content.at_eof() else self._response.close()


class LimitedLog:
    """Logs errors about a condition that can hold for many requests at once, at most one in LOG_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: float | None = None

    def error(self, message: str, *arguments: object) -> None:
        """Log an error, unless one was logged shortly before."""
        now = self._clock()
        if self._logged is None or now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.error(message, *arguments)


class Upstream:
    """The HTTP client for all engines, with a connection pool, and fresh connections on request."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        """They apply to the requests that follow."""
        self._log = LimitedLog()
        pooled = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session, self._unpooled = (
            aiohttp.ClientSession(
                connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
            for connector in (pooled, aiohttp.TCPConnector(limit=0, force_close=True))
        )

    async def close(self) -> None:
        await self._session.close()
        await self._unpooled.close()

    async def send(
        self,
        replica: Replica,
        outbound: Outbound,
        headers: CIMultiDict[str],
        deadline: Deadline,
        *,
        fresh_connection: bool,
        trust: ssl.SSLContext | bool,
    ) -> Answer:
        """Send a request and wait for the first bytes of the answer. Raises UpstreamFailed and OutOfFiles.

        `headers` are all headers to send. `deadline` bounds the whole exchange.
        timeouts.firstByteSeconds applies only if the answer is streamed: otherwise its first byte is sent when it is
        complete.
        `trust` is the `ssl` argument of the request.
        `fresh_connection` bypasses the connection pool: a crashed engine leaves stale pooled connections behind.
        """
        session = self._unpooled if fresh_connection else self._session
        left_seconds = max(0.001, deadline.left_seconds)
        body, timeouts = outbound.body, self.timeouts
        seconds = min(timeouts.first_byte_seconds, left_seconds) if outbound.streamed else left_seconds
        wait = asyncio.timeout_at(begins_by := asyncio.get_running_loop().time() + seconds)
        connect_seconds = min(timeouts.connect_seconds, left_seconds)
        # Only those of connecting. `wait` and `Answer` limit the time of the answer.
        limits = aiohttp.ClientTimeout(
            total=None,
            connect=connect_seconds if _must_be_resolved(replica.url) else None,
            sock_connect=connect_seconds,
        )
        replica.waits.add(wait)
        try:
            async with wait:
                response = await session.request(
                    outbound.method,
                    _url(replica.url, outbound.path),
                    # aiohttp sends large bodies in parts, without blocking the event loop, only from a file.
                    data=io.BytesIO(body) if body and len(body) > _LARGE_BODY_BYTES else body,
                    headers=headers,
                    timeout=limits,
                    allow_redirects=False,
                    ssl=trust,
                )
                try:
                    first = await response.content.readany()
                except BaseException:
                    response.close()
                    raise
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise self._failure(error, lost=wait not in replica.waits) from error
        finally:
            replica.waits.discard(wait)
        answer = Answer(response, first, timeouts, deadline, begins_by)
        if response.status in RETRYABLE_STATUSES:
            raise UpstreamFailed(
                f"status_{response.status}",
                f"the engine answered {response.status}",
                await answer.rejection(),
            )
        return answer

    def _failure(self, error: Exception, *, lost: bool) -> UpstreamFailed | OutOfFiles:
        """The failure of a request whose answer has not begun.

        lost: whether its wait was ended because the engine stopped responding.
        """
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            if out_of_files(error):
                self._log.error("no file descriptor is free for a connection to an engine")
                return OutOfFiles("the gateway cannot open another connection")
            return UpstreamFailed("connect", "the engine cannot be reached")
        if isinstance(error, TimeoutError):
            return not_begun(lost=lost)
        return UpstreamFailed("disconnect", "the engine closed the connection")


def not_begun(*, lost: bool) -> UpstreamFailed:
    """The failure of a replica that did not begin to answer in time. `lost`: because it stopped responding."""
    if lost:
        return UpstreamFailed("lost", "the engine stopped responding before it answered")
    return UpstreamFailed("timeout", "the engine did not begin to answer in time")


def out_of_files(error: Exception) -> bool:
    """Whether a connection failed because the process or the system has no free file descriptor."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


@lru_cache(maxsize=1024)
def _url(base_url: str, path: str) -> URL:
    return URL(base_url + path, encoded=True)


@lru_cache(maxsize=1024)
def _must_be_resolved(base_url: str) -> bool:
    """Whether a URL contains a name, whose resolution takes time that the timeout of a socket does not bound."""
    try:
        ipaddress.ip_address(URL(base_url).host or "")
    except ValueError:
        return True
    return False


def forwarded_headers(
    incoming: "CIMultiDictProxy[str]", api_key: str | None, added: Mapping[str, str], request_id: str
) -> CIMultiDict[str]:
    """The request headers for an engine: the client's headers without credentials, and those that the gateway adds.

    added: headers that replace the client's.
    """
    headers = _without(incoming, _NOT_FORWARDED)
    if headers.get("Content-Encoding", "").lower() in DECODED:
        # aiohttp has already decompressed the body.
        del headers["Content-Encoding"]
    # The answer must not be compressed, because the gateway reads the usage in it.
    headers["Accept-Encoding"] = "identity"
    headers["x-request-id"] = request_id
    headers.update(added)
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def _without(headers: "CIMultiDictProxy[str] | CIMultiDict[str]", names: frozenset[str]) -> CIMultiDict[str]:
    """The headers without `names` and without those that the Connection header nominates (RFC 9110, 7.6.1).

    Values that are not valid UTF-8 are left out as well, because they cannot be sent.
    """
    if "connection" in headers:
        listed = ",".join(headers.getall("connection")).lower().split(",")
        names |= {name.strip() for name in listed}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in names and (value.isascii() or is_text(value))
    )
