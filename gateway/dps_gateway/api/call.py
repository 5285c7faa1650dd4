"""Common to the handlers of all proxied endpoints: tracing, metrics, error responses, and writing to the client."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from aiohttp import hdrs, web
from opentelemetry.trace import Span

from dps_gateway.api.errors import DeadlineExceeded, GatewayFull, error_response, errors_of
from dps_gateway.api.request import TIMEOUT_HEADER, read_body, request_id_of, timeout_seconds_of
from dps_gateway.api.sse import EventRelay
from dps_gateway.auth import Key
from dps_gateway.engine.dialect import ErrorFormat, Usage
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.tracing import end_server_span

log = logging.getLogger(__name__)

RUNTIME: Final = web.AppKey("runtime", Runtime)

CLIENT_CLOSED_REQUEST: Final = 499
"""The status in metrics and spans of a request whose client disconnected before the answer was complete."""

T = TypeVar("T")

_MAY_HAVE_USED_TOKENS: Final = frozenset({200, CLIENT_CLOSED_REQUEST, 504})
"""The statuses of requests that an engine has begun to answer, or may have begun if it has received them."""

MIN_WRITE_SECONDS: Final = 1.0
"""Time for one write after timeouts.totalSeconds, so that the error event of a timeout reaches the client."""


@dataclass(slots=True)
class Call:
    """One client request while it is being served."""

    runtime: Runtime
    request: web.Request
    request_id: str
    span: Span
    """The request's SERVER span."""
    started: float
    """`time.perf_counter()` at the request's arrival."""
    headers: dict[str, str] = field(default_factory=dict)
    """The response headers that the gateway adds, as known so far. Error responses include them as well."""
    response: web.StreamResponse | None = None
    """The response, once its headers have been sent."""
    status: int = CLIENT_CLOSED_REQUEST
    """The HTTP status for metrics and spans."""
    timeout_seconds: float | None = None
    """The time that the client allows for the whole request, in seconds, or None."""
    usage: Usage | None = None
    """The usage that the engine reported, if any."""
    events: EventRelay | None = None
    """The events of a streamed answer."""
    key: Key | None = None
    """The client's API key after `authenticate`; None if no keys are configured."""
    dispatched: bool = False
    """Whether a replica has been selected for the request. Only the time until the first selection is recorded."""
    _entered: bool = False
    """Whether the request counts for its API key, which it does not if the key has reached a limit."""
    _buffered: int = 0
    """The size of the request's body, as far as it has arrived."""
    _deadline: float = 0.0
    """The end of the time for the whole response, on the event loop's clock."""
    _write_limit: float | None = None
    """The end of the time for the write in progress, on the event loop's clock."""
    _watch: asyncio.TimerHandle | None = None

    def authenticate(self) -> None:
        """Check the client's API key, and count the request for it. Raises Unauthorized, KeyBusy and KeyExhausted."""
        self.key = self.runtime.key(self.request.headers)
        if self.key is not None:
            self.runtime.key_limits.enter(self.key)
            self._entered = True

    async def body(self) -> bytes:
        """The request's body, which counts as buffered until the call has ended.

        Raises BodyTooLarge, BodyTooSlow, BadRequest, and GatewayFull if there is no room for it.
        """
        return await read_body(self.request, self.runtime.config, self._buffer)

    async def in_time(self, work: Awaitable[T]) -> T:
        """The result of work before the dispatch. Raises DeadlineExceeded at the end of the client's time."""
        if self.timeout_seconds is None:
            return await work
        try:
            async with asyncio.timeout(self.timeout_seconds - (time.perf_counter() - self.started)) as limit:
                return await work
        except TimeoutError as error:
            raise (self.deadline_exceeded() if limit.expired() else error) from error

    def deadline_exceeded(self) -> DeadlineExceeded:
        """The error of a request that no engine has answered within the client's time."""
        return DeadlineExceeded(f"no engine answered within {self.timeout_seconds:g} s ({TIMEOUT_HEADER})")

    def _buffer(self, size: int) -> None:
        if not self.runtime.bodies.reserve(self.tenant, size):
            raise GatewayFull("the gateway has too many request bodies in memory (limits.maxBufferedBytes)")
        self._buffered += size

    @property
    def tenant(self) -> str:
        """The tenant of the request after `authenticate`: the empty string if no keys are configured."""
        return self.key.tenant if self.key is not None else ""

    def ended(self) -> None:
        """Stop watching the client, release the memory of the body, and stop counting the request for its API key."""
        self.runtime.bodies.release(self.tenant, self._buffered)
        if self._watch is not None:
            self._watch.cancel()
        if self.key is not None and self._entered:
            self.runtime.key_limits.leave(self.key, self._tokens)

    @property
    def _tokens(self) -> int:
        """The tokens that the request has used: those of its prompt and its answer, as reported by the engine.

        Without such a report, for example because the client has disconnected or its time is over, the prompt counts if
        an engine has received it, and one token for each event of the answer.
        """
        if self.usage is not None:
            return self.usage.prompt_tokens + self.usage.completion_tokens
        status = self.response.status if self.response is not None else self.status
        if status not in _MAY_HAVE_USED_TOKENS or "x-dps-pool" not in self.headers:
            return 0
        events = self.events.count if self.events is not None else 0
        return int(self.headers.get("x-dps-prompt-tokens", 0)) + events

    @property
    def errors(self) -> ErrorFormat:
        """The format of error objects for this request."""
        return errors_of(self.request.path)

    async def start(self, response: web.StreamResponse) -> None:
        """Send the response headers, including those that the gateway adds."""
        seconds = self.runtime.config.timeouts.total_seconds
        if self.timeout_seconds is not None:
            seconds = min(seconds, self.timeout_seconds - (time.perf_counter() - self.started))
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + seconds
        self._watch = loop.call_at(self._limit(loop.time()), self._check_write, loop)
        response.headers.update(self.headers)
        self.response = response
        await response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        """Send a part of the body, which the answer to a HEAD request does not have.

        Raises ConnectionResetError if the client has disconnected.

        The time for a write is limited, because a client that does not read would occupy a slot on the engine
        indefinitely.
        """
        if data and self.request.method != hdrs.METH_HEAD:
            response = self._started()
            self._write_limit = self._limit(asyncio.get_running_loop().time())
            try:
                await response.write(data)
            finally:
                self._write_limit = None

    async def finish(self, data: bytes = b"") -> None:
        """Send the last part of the body. Raises ConnectionResetError as `write` does.

        A client may close the connection as soon as it has read the last byte, which cancels the handler. The request
        counts as answered even if that happens before `finish` returns.
        """
        response = self._started()
        self.status = response.status
        self._write_limit = self._limit(asyncio.get_running_loop().time())
        try:
            await response.write_eof(data)
        except ConnectionResetError:
            self.status = CLIENT_CLOSED_REQUEST
            raise
        finally:
            self._write_limit = None

    def abort(self) -> None:
        """Close the connection immediately, so that an incomplete body cannot be mistaken for a complete one."""
        if self.request.transport is not None:
            self.request.transport.abort()

    def _started(self) -> web.StreamResponse:
        assert self.response is not None
        return self.response

    def _limit(self, now: float) -> float:
        """The end of the time for a write that starts now."""
        idle_seconds = self.runtime.config.timeouts.idle_seconds
        return min(now + idle_seconds, max(self._deadline, now + MIN_WRITE_SECONDS))

    def _check_write(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connection if the client has stopped reading.

        A single timer, which is set again when it expires, costs less than a timer for each write.
        """
        now = loop.time()
        limit = self._write_limit if self._write_limit is not None else self._limit(now)
        if limit > now:
            self._watch = loop.call_at(limit, self._check_write, loop)
            return
        log.info("request %s: the client has stopped reading; connection closed", self.request_id)
        self.status = CLIENT_CLOSED_REQUEST
        self.abort()


def access_entry(call: Call, route: str) -> dict[str, Any]:
    """The line of the access log for a call that has ended. docs/gateway.md describes the fields for users."""
    seconds = time.perf_counter() - call.started
    usage = call.usage
    return {
        "time": round(time.time() - seconds, 6),
        "request_id": call.request_id,
        "tenant": call.tenant,
        "method": call.request.method,
        "route": route,
        "status": call.status,
        "seconds": round(seconds, 6),
        "pool": call.headers.get("x-dps-pool"),
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "output_tokens": usage.completion_tokens if usage else None,
        "cached_tokens": usage.cached_tokens if usage else None,
    }


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def handler(route: str, metric_label: str, serve: Callable[[Call], Awaitable[web.StreamResponse]]) -> Handler:
    """Returns the aiohttp handler that serves calls with `serve`.

    `route` is the path or pattern that spans record; `metric_label` is the route in metrics. Every call is
    traced and counted, and every exception becomes an error object or, after the headers have been sent, a
    closed connection.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        runtime = request.app[RUNTIME]
        span = runtime.tracing.server_span(request.method, route, request.headers)
        request_id = request_id_of(request)
        call = Call(runtime, request, request_id, span, time.perf_counter(), {"x-request-id": request_id})
        failure: Exception | None = None
        try:
            call.timeout_seconds = timeout_seconds_of(request)
            return await serve(call)
        except ConnectionResetError:
            call.abort()
            return call.response or web.Response(status=call.status)
        except Exception as error:
            failure = error
            if call.response is not None:
                log.exception("request %s failed after its response had begun", call.request_id)
                call.status = 500
                call.abort()
                return call.response
            response = error_response(error, call.request_id, call.errors, call.headers)
            call.status = response.status
            return response
        finally:
            call.ended()
            if runtime.access_log is not None:
                runtime.access_log.add(access_entry(call, route))
            runtime.metrics.requests.labels(metric_label, str(call.status)).inc()
            end_server_span(span, call.status, failure)

    return handle
