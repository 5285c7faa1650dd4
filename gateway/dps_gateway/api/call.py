"""One request of a client while it is served: what is known about it so far, and the connection to the client."""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import hdrs, web
from opentelemetry.trace import Span

from dps_gateway.api.body import Body
from dps_gateway.api.endpoints import errors_of
from dps_gateway.api.errors import (
    BadRequest,
    OpenAIErrors,
    Problem,
    Refused,
)
from dps_gateway.api.outcome import Outcome
from dps_gateway.api.sse import EventRelay
from dps_gateway.auth import URGENCIES, Key
from dps_gateway.engine.usage import Usage
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, PolicyInput, Reason
from dps_gateway.runtime import Runtime
from dps_gateway.session.growth import History
from dps_gateway.session.record import StoredResponse
from dps_gateway.turn import MeasuredTurn
from dps_gateway.upstream.exchange import DECODED
from dps_gateway.upstream.fair_queue import DEFAULT_URGENCY

log = logging.getLogger(__name__)

RUNTIME: Final = web.AppKey("runtime", Runtime)

CLIENT_CLOSED_REQUEST: Final = 499
"""The status in metrics and spans of a request whose client disconnected before the answer was complete."""

BODY_GRACE_SECONDS: Final = 30.0
"""Time after which the body of a request must arrive at the minimum rate."""

MAX_REQUEST_ID_CHARS: Final = 255

REQUEST_ID_BYTES: Final = 16

TIMEOUT_HEADER: Final = "x-envoy-upstream-rq-timeout-ms"
"""Limits the duration of a request including its retries, as in Envoy."""

MAX_TIMEOUT_DIGITS: Final = 12
"""Longer numbers are cut off; timeouts.totalSeconds is shorter in any case."""

_MAY_HAVE_USED_TOKENS: Final = frozenset({200, CLIENT_CLOSED_REQUEST, 504})
"""The statuses of requests that an engine has begun to answer, or may have begun if it has received them."""

MIN_WRITE_SECONDS: Final = 1.0
"""Time for one write after timeouts.totalSeconds, so that the error event of a timeout reaches the client."""


@dataclass(slots=True, eq=False)
class Call:
    """One client request, and what becomes known about it while it is served (see `inference.serve`)."""

    runtime: Runtime
    request: web.Request
    request_id: str
    span: Span
    """The request's SERVER span."""
    started: float
    """`time.perf_counter()` at the request's arrival."""
    timeout_seconds: float | None = None
    """The time that the client allows for the whole request, in seconds, or None."""
    key: Key | None = None
    """The client's API key after `authenticate`; None if no keys are configured."""
    tenant: str = ""
    """The tenant of that key; the empty string if no keys are configured."""
    body: Body = field(default_factory=lambda: Body(b"{}", {}))
    """The request's JSON object; empty if the endpoint is not routed."""
    stored: StoredResponse | None = None
    """The stored response that the request continues, if any. Only its engine can serve the request."""
    turn: MeasuredTurn | None = None
    """None for a request that is not a turn of a session."""
    prompt_tokens: int | None = None
    """L_t, or the sum over several prompts. None if the prompts cannot be counted."""
    policy_input: PolicyInput | None = None
    """The policy's input, for a turn."""
    decision: Decision | None = None
    decided_at: float = 0.0
    """`time.perf_counter()` at the routing decision."""
    attempt: tuple[Pool, Reason] | None = None
    """The pool of the last attempt to have the request answered, and why that pool was used."""
    replica: str | None = None
    """The base URL of the replica of this attempt."""
    queue_seconds: float | None = None
    """The time that the request waited for a replica before its first attempt."""
    first_byte_at: float | None = None
    """`time.perf_counter()` when an engine began to answer."""
    answered_at: float | None = None
    """`time.perf_counter()` when the engine had answered completely. None if it has not, or has refused the request."""
    response: web.StreamResponse | None = None
    """The response, once its headers have been sent."""
    status: int = CLIENT_CLOSED_REQUEST
    """The HTTP status for metrics and spans."""
    outcome: Outcome = Outcome.CLIENT_CLOSED
    """How the answer has ended."""
    events: EventRelay | None = None
    """The events of a streamed answer."""
    usage: Usage | None = None
    """The usage that the engine reported, if any."""
    _entered: bool = False
    """Whether the request counts for its API key, which it does not if the key has reached a limit."""
    _buffered: int = 0
    """The size of the request's body, as far as it has arrived."""
    _deadline: float = 0.0
    """The end of the time for the whole response, on the event loop's clock."""
    _written_at: float = -math.inf
    """When the last part of the response was sent, on the event loop's clock."""
    _write_limit: float | None = None
    """The end of the time for the write in progress, on the event loop's clock."""
    _watch: asyncio.TimerHandle | None = None
    _next_heartbeat: asyncio.TimerHandle | None = None
    _heartbeat: asyncio.Task[None] | None = None
    """The heartbeat that is being sent, or was sent last."""

    def authenticate(self) -> None:
        """Check the client's API key, and count the request for it. Raises Unauthorized, KeyBusy and KeyExhausted."""
        if self.runtime.keys is not None:
            self.key = self.runtime.keys.key(self.request.headers)
            self.tenant = self.key.tenant
            self.runtime.key_limits.enter(self.key)
            self._entered = True

    async def read(self) -> bytes:
        """The request's body, decompressed, which counts as buffered until the call has ended.

        Raises Refused if its encoding is unknown, if it exceeds limits.maxBodyBytes, if it takes longer than
        timeouts.bodySeconds or, after BODY_GRACE_SECONDS, arrives at less than limits.minBodyBytesPerSecond on average,
        if it is incomplete, and if there is no room for it.
        """
        request, runtime, loop = self.request, self.runtime, asyncio.get_running_loop()
        limits, body_seconds = runtime.config.limits, runtime.config.timeouts.body_seconds
        began, rate = loop.time(), limits.min_body_bytes_per_second

        def ends(size: int) -> float:
            seconds = BODY_GRACE_SECONDS + size / rate if rate else body_seconds
            return began + min(body_seconds, seconds)

        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() not in (*DECODED, "identity", ""):
            encodings = ", ".join(sorted(DECODED))
            raise Refused(Problem.UNSUPPORTED_ENCODING, f"Content-Encoding must be one of {encodings}")
        self._check_size(request.content_length or 0)
        chunks = []
        has_arrived = request.content.is_eof()  # most bodies have arrived with the head and need no timer
        try:
            async with asyncio.timeout_at(None if has_arrived else ends(0)) as limit:
                while chunk := await request.content.readany():
                    self._check_size(self._buffered + len(chunk))
                    shared = runtime.has_several_tenants
                    if not runtime.bodies.reserve(self.tenant, len(chunk), limits, shared=shared):
                        raise Refused(
                            Problem.GATEWAY_FULL,
                            "the gateway has too many request bodies in memory (limits.maxBufferedBytes)",
                        )
                    self._buffered += len(chunk)
                    chunks.append(chunk)
                    if not has_arrived:
                        limit.reschedule(ends(self._buffered))
        except (web.RequestPayloadError, aiohttp.ClientPayloadError) as error:
            raise BadRequest("the request body is incomplete or cannot be decompressed") from error
        except TimeoutError as error:
            raise Refused(
                Problem.BODY_TOO_SLOW,
                f"the body was incomplete after {loop.time() - began:.3g} s (timeouts.bodySeconds or "
                "limits.minBodyBytesPerSecond)",
            ) from error
        return b"".join(chunks)

    def _check_size(self, size: int) -> None:
        most = self.runtime.config.limits.max_body_bytes
        if size > most:
            message = f"the request is larger than {most} bytes (limits.maxBodyBytes)"
            raise Refused(Problem.BODY_TOO_LARGE, message)

    @asynccontextmanager
    async def before_dispatch(self) -> AsyncIterator[None]:
        """The context of the work before the dispatch. Raises Refused at the end of the client's time."""
        try:
            async with asyncio.timeout(self._left_seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise Refused(
                Problem.DEADLINE_EXCEEDED,
                f"no engine answered within {self.timeout_seconds:g} s ({TIMEOUT_HEADER})",
            ) from error

    @property
    def _left_seconds(self) -> float | None:
        """What remains of the client's time, or None if it has set no limit."""
        if self.timeout_seconds is None:
            return None
        return self.timeout_seconds - (time.perf_counter() - self.started)

    def ended(self) -> None:
        """Stop watching the client, release the memory of the body, and stop counting the request for its API key."""
        self.stop_heartbeats()
        self.runtime.bodies.release(self.tenant, self._buffered)
        if self._watch is not None:
            self._watch.cancel()
        if self.key is not None and self._entered:
            self.runtime.key_limits.leave(self.key, self._tokens)

    @property
    def _tokens(self) -> int:
        """The tokens that the request has used: those of its prompt and its answer, as reported by the engine.

        Without such a report, for example because the client has disconnected or its time is over, the prompt counts if
        an engine has received it, and for each event of the answer as many tokens as in the pool's recent answers. With
        speculation, an event has several.
        """
        if self.usage is not None:
            return self.usage.prompt_tokens + self.usage.completion_tokens
        status = self.response.status if self.response is not None else self.status
        if status not in _MAY_HAVE_USED_TOKENS or self.attempt is None:
            return 0
        events = self.events.count if self.events is not None else 0
        per_event = self.runtime.pools[self.attempt[0]].tokens_per_event or 1.0
        return (self.prompt_tokens or 0) + round(events * per_event)

    def progress(self) -> dict[str, Any]:
        """What the page on the admin port shows of the request while it is served."""
        if self.first_byte_at is not None:
            phase = "decoding"
        elif self.attempt is not None:
            # The end of the prefill cannot be observed if the answer is not streamed.
            phase = "prefill" if self.body.fields.get("stream") is True else "running"
        else:
            phase = "queued"
        return {
            "request_id": self.request_id,
            "session": self.turn.session.id.text if self.turn is not None else None,
            "client_session": self.turn.session.client_id if self.turn is not None else None,
            "prompt_tokens": self.prompt_tokens,
            "pool": self.attempt[0].value if self.attempt is not None else None,
            "replica": self.replica,
            "phase": phase,
            "seconds": round(time.perf_counter() - self.started, 3),
        }

    @property
    def errors(self) -> OpenAIErrors:
        """The form of error objects for this request."""
        return errors_of(self.request.path)

    @property
    def headers(self) -> dict[str, str]:
        """The response headers that the gateway adds, as far as is known. Error responses have them as well."""
        headers = {"x-request-id": self.request_id}
        if self.turn is not None:
            session = self.turn.session
            headers |= {
                "x-dps-prompt-tokens": str(self.turn.prompt_tokens),
                "x-dps-delta-tokens": str(self.turn.delta_tokens),
                "x-dps-turn": str(self.turn.number),
                "x-dps-session": session.id.text,
                "x-dps-state": session.snapshot.source.value,
                "x-dps-history": session.growth.history.value,
            }
        elif self.decision is not None and self.decision.stateless:
            headers["x-dps-history"] = History.STATELESS.value
            if self.prompt_tokens is not None:
                tokens = str(self.prompt_tokens)
                headers |= {"x-dps-prompt-tokens": tokens, "x-dps-delta-tokens": tokens}
        if self.decision is not None and (predicted := self.decision.predicted):
            headers["x-dps-predicted"] = ",".join(
                f"{pool.value}={predicted[pool]:.3f}" for pool in Pool if pool in predicted
            )
        if self.attempt is not None:
            pool, reason = self.attempt
            headers |= {"x-dps-pool": pool.value, "x-dps-reason": reason.value}
        return headers

    async def start(self, response: web.StreamResponse, *, without: Sequence[str] = ()) -> None:
        """Send the response headers, including those that the gateway adds except `without`."""
        seconds, left = self.runtime.config.timeouts.total_seconds, self._left_seconds
        seconds = seconds if left is None else min(seconds, left)
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + seconds
        self._watch = loop.call_at(self._limit(loop.time()), self._check_write, loop)
        response.headers.update({name: value for name, value in self.headers.items() if name not in without})
        self.response = response
        await response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        """Send a part of the body, which the answer to a HEAD request does not have.

        Raises ConnectionResetError if the client has disconnected.

        The time for a write is limited, because a client that does not read would occupy a slot on the engine
        indefinitely.
        """
        if data and self.request.method != hdrs.METH_HEAD:
            assert self.response is not None
            self._written_at = asyncio.get_running_loop().time()
            self._write_limit = self._limit(self._written_at)
            try:
                await self.response.write(data)
            finally:
                self._write_limit = None

    def start_heartbeats(self, event: bytes) -> None:
        """Send `event` after every timeouts.heartbeatSeconds in which nothing else has been sent.

        Clients and load balancers close connections on which nothing arrives for some time, often 60 seconds. The first
        heartbeat also sends the headers, with status 200, if the answer has not begun.
        """
        if seconds := self.runtime.config.timeouts.heartbeat_seconds:
            loop = asyncio.get_running_loop()
            self._next_heartbeat = loop.call_later(seconds, self._check_heartbeat, loop, event, seconds)

    def stop_heartbeats(self) -> None:
        """Send no more heartbeats."""
        if self._next_heartbeat is not None:
            self._next_heartbeat.cancel()
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def _check_heartbeat(self, loop: asyncio.AbstractEventLoop, event: bytes, seconds: float) -> None:
        """Send a heartbeat if it is due. As in `_check_write`, a single timer is set again when it expires."""
        due = self._written_at + seconds
        if loop.time() >= due:
            self._heartbeat = loop.create_task(self._send_heartbeat(event))
            due = loop.time() + seconds
        self._next_heartbeat = loop.call_at(due, self._check_heartbeat, loop, event, seconds)

    async def _send_heartbeat(self, event: bytes) -> None:
        with suppress(ConnectionResetError):  # the handler is cancelled as well
            if self.response is None:
                # Another attempt may still move the request to another pool.
                response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream"})
                await self.start(response, without=("x-dps-pool", "x-dps-reason"))
            between_events = self.events is None or not self.events.within_event
            if between_events and self._write_limit is None:  # nothing else is being sent
                await self.write(event)

    async def finish(self, data: bytes = b"") -> None:
        """Send the last part of the body. Raises ConnectionResetError as `write` does.

        A client may close the connection as soon as it has read the last byte, which cancels the handler. The request
        counts as answered even if that happens before `finish` returns.
        """
        assert self.response is not None
        self.status = self.response.status
        if self.outcome is Outcome.CLIENT_CLOSED:
            self.outcome = Outcome.COMPLETE if self.status < 400 else Outcome.FAILED
        self._write_limit = self._limit(asyncio.get_running_loop().time())
        try:
            await self.response.write_eof(data)
        except ConnectionResetError:
            self.status = CLIENT_CLOSED_REQUEST
            raise
        finally:
            self._write_limit = None

    def abort(self) -> None:
        """Close the connection immediately, so that an incomplete body cannot be mistaken for a complete one."""
        if self.request.transport is not None:
            self.request.transport.abort()

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


def request_id_of(request: web.BaseRequest) -> str:
    """The client's x-request-id, or a new id if it sends none that is usable in a header and a log line."""
    sent = request.headers.get("x-request-id", "")
    usable = 0 < len(sent) <= MAX_REQUEST_ID_CHARS and sent.isascii() and sent.isprintable()
    return sent if usable else os.urandom(REQUEST_ID_BYTES).hex()


def timeout_seconds_of(headers: Mapping[str, str]) -> float | None:
    """The time that the client allows for the whole request, in seconds, or None. Raises BadRequest.

    Envoy's header is in milliseconds, and 0 means no limit.
    """
    sent = headers.get(TIMEOUT_HEADER)
    if sent is None:
        return None
    if not sent.isascii() or not sent.isdecimal():
        raise BadRequest(f"{TIMEOUT_HEADER} must be a number of milliseconds")
    return int(sent[:MAX_TIMEOUT_DIGITS]) / 1000 or None


def urgency_of(priorities: Sequence[str], key: Key | None) -> int:
    """The urgency in the queue, from 0 (served first) to 7: that of the Priority headers (RFC 9218), as far as the API
    key permits it.

    If the key permits none, a client can only lower its priority. As the RFC demands, values that are not valid are
    ignored.
    """
    asked = DEFAULT_URGENCY
    for member in ",".join(priorities).split(",") if priorities else ():
        name, _, value = member.strip().partition("=")
        value = value.partition(";")[0].strip()
        if name == "u" and value in URGENCIES:
            asked = int(value)
    return max(asked, DEFAULT_URGENCY if key is None or key.urgency is None else key.urgency)
