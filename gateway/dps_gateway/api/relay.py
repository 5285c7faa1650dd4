"""Sending an engine's answer to the client, and committing its turn."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import orjson
from aiohttp import hdrs, web
from multidict import CIMultiDict
from opentelemetry.trace import Span

from dps_gateway.api import spans
from dps_gateway.api.call import Call
from dps_gateway.api.continuation import Continuation, Recorder
from dps_gateway.api.dispatch import DISPATCH_ERRORS, Dispatch
from dps_gateway.api.endpoints.base import Endpoint, NotContinuable, TextEndpoint
from dps_gateway.api.endpoints.openai import USAGE_FIELD, without_details
from dps_gateway.api.errors import error_event
from dps_gateway.api.outcome import Outcome
from dps_gateway.api.record import Answered, record_answer
from dps_gateway.api.sse import EventRelay
from dps_gateway.engine.usage import Usage
from dps_gateway.session.record import StoredResponse
from dps_gateway.telemetry.tracing import fail_span, span_reference
from dps_gateway.upstream.exchange import Answer, Rejection, UpstreamBroken, UpstreamFailed

log = logging.getLogger(__name__)

MAX_ENDING_BYTES: Final = 1024 * 1024
"""What an engine sends after the closing event of a stream is held in memory up to this size. The rest is dropped."""

MAX_ERROR_BYTES: Final = 1024 * 1024
"""Error bodies longer than this are relayed unchanged."""

PART_BYTES: Final = 256 * 1024
"""Longer bodies are sent in parts of this size, because the time for each write is limited."""


class Relay:
    """One answer of a routed endpoint on its way to the client.

    The last bytes are sent after the turn has been committed. A client that has read the complete answer can therefore
    rely on the commit, whichever gateway replica receives its next turn. The rest of a stream does not wait for it.

    If the engine of a stream of plain text fails, another one continues the stream.
    """

    def __init__(
        self, call: Call, endpoint: Endpoint, dispatch: Dispatch, span: Span, added: Mapping[str, Any]
    ) -> None:
        """`span` is the CLIENT span of the upstream request, `added` are the fields that the gateway has added to it.

        The caller closes `dispatch`.
        """
        self._call = call
        self._endpoint = endpoint
        self._dispatch = dispatch
        self._span = span
        self._added = added
        self._first_byte = call.first_byte_at = time.perf_counter()
        self._stores = endpoint.stores and call.body.fields.get("store") is not False and self._answers
        """Whether the engine may store the answer."""
        self._recorder: Recorder | None = None
        """What the client has received of a stream; None if no other engine can continue it."""
        self._continuation: Continuation | None = None
        """The rest of an answer whose first engine has failed."""

    @property
    def _answers(self) -> bool:
        """Whether the engine answers, and does not refuse the request."""
        return self._dispatch.answer.status == 200

    async def run(self) -> web.StreamResponse:
        """Send the whole answer. Raises ConnectionResetError if the client disconnects."""
        self._describe_placement()
        answer = self._dispatch.answer
        if not (self._answers and answer.streams):
            self._call.stop_heartbeats()  # the next one would send the headers of a stream
        if self._call.response is not None and not (self._answers and answer.streams):  # after a heartbeat
            refused = Rejection(answer.status, self._dispatch.content, None) if not self._answers else None
            raise _no_stream(answer, refused)
        metrics, pool = self._call.runtime.metrics, self._dispatch.pool
        metrics.decisions.labels(pool.name.value, self._dispatch.reason.value).inc()
        if self._answers:
            pool.record_token(self._dispatch.replica)
            seconds = self._first_byte - self._call.started
            metrics.time_to_first_token.labels(pool.name.value).observe(seconds)
            model = self._call.runtime.config.model.name
            metrics.genai_first_token.labels(self._endpoint.operation, model).observe(seconds)
        return await (self._send_stream() if self._dispatch.answer.streams else self._send_whole())

    def _describe_placement(self) -> None:
        dispatch = self._dispatch
        spans.describe_placement(
            self._span, dispatch.replica.url, dispatch.pool.name, dispatch.reason, dispatch.answer.status
        )

    async def _send_whole(self) -> web.StreamResponse:
        content = self._dispatch.content
        if self._answers and content:
            await self._commit()
            await self._record(self._endpoint.read_usage(content))
            content = without_details(content, self._added.keys())
        else:
            self._call.outcome = Outcome.COMPLETE if self._answers else Outcome.FAILED
        # The engine has finished. A client that reads slowly does not occupy its slot.
        self._dispatch.close()
        return await send_complete(self._call, self._dispatch.answer, content)

    async def _send_stream(self) -> web.StreamResponse:
        """Forward events as they arrive; the closing one waits for the commit."""
        call, answer = self._call, self._dispatch.answer
        endpoint, continues = self._endpoint, call.runtime.config.retries.continue_streams
        if continues and isinstance(endpoint, TextEndpoint) and endpoint.continuable(call.body.fields):
            self._recorder = Recorder(endpoint)
        call.events = events = EventRelay(endpoint, self._added.keys())
        response = call.response or web.StreamResponse(status=answer.status, headers=client_headers(answer))
        if call.response is None:
            await call.start(response)
        commit = asyncio.ensure_future(self._commit())
        try:
            try:
                last = await self._forward_events(events)
            except UpstreamBroken as error:
                log.warning("request %s: %s", call.request_id, error)
                self._count_failure(error)
                usage, last = await self._continue(events, error)
            else:
                usage = events.usage
            await commit
            if self._continuation is not None:
                await self._commit()  # the replica that has continued the stream holds the prompt, too
            await self._record(usage)
        except UpstreamBroken as error:
            call.outcome = Outcome.ABORTED if error.kind == "aborted" else Outcome.BROKEN
            fail_span(self._span, error)
            last = call.events.error or error_event(error, call.errors)
            if call.events.within_event:  # otherwise the error would be a part of this incomplete event
                last = b"\n\n" + last
        finally:
            await asyncio.shield(commit)
        await call.finish(last)
        return response

    async def _forward_events(self, events: EventRelay) -> bytes:
        """Forward all events of the answer but the closing one, which is returned.

        Raises UpstreamBroken if the stream ends without a closing event. If the engine closes the connection after
        the closing event, or does not stop sending, the answer is complete.
        """
        pool, replica = self._dispatch.pool, self._dispatch.replica
        ready, closing = events.feed(self._dispatch.answer.first)
        remembered = not self._stores
        if not remembered and (usage := events.usage) is not None:
            remembered = True
            await self._remember(usage)
        await self._write(ready)
        try:
            _check(events)
            async for chunk in self._dispatch.answer.rest():
                pool.record_token(replica)
                ready, done = events.feed(chunk)
                if closing:  # nothing may overtake the closing event, which waits for the commit
                    closing += ready + done
                    if len(closing) > MAX_ENDING_BYTES:
                        break
                    continue
                closing = done
                if not remembered and (usage := events.usage) is not None:
                    remembered = True
                    await self._remember(usage)
                await self._write(ready)
                _check(events)
        except UpstreamBroken:
            if not closing:
                raise
        if not closing and self._answers:
            ending = self._endpoint.closing[0].decode().partition(": ")[2]
            raise UpstreamBroken(f"the engine ended the stream without {ending}")
        return closing + events.finish()

    async def _write(self, events: bytes) -> None:
        """Send events of the engine to the client."""
        if self._continuation is not None:
            events = self._continuation.feed(events)
        elif self._recorder is not None:
            self._recorder.add(events)
        await self._call.write(events)

    def _count_failure(self, error: UpstreamBroken) -> None:
        kind = "aborted" if error.kind == "aborted" else "broken"
        self._call.runtime.metrics.upstream_failures.labels(self._dispatch.pool.name.value, kind).inc()

    async def _continue(self, before: EventRelay, error: UpstreamBroken) -> tuple[Usage | None, bytes]:
        """Continue the stream, which failed with `error`, on another engine.

        `before` are the events of the engine that failed. Returns the usage of the whole answer and the closing event.
        Raises `error` if the stream cannot be continued.
        """
        dispatch = self._dispatch
        failed, outcome, events = dispatch.replica.url, "abandoned", before
        try:
            continuation, body = await self._rest()
        except NotContinuable as reason:
            log.debug("request %s: its stream cannot be continued: %s", self._call.request_id, reason)
            dispatch.record_end(error)
            raise error from reason
        try:
            if body is None:
                dispatch.record_end(error)
                outcome = "completed"
                return self._complete(continuation, before.usage)
            await dispatch.rest(error, body)
            events = EventRelay(self._endpoint, self._added.keys())
            self._describe_placement()
            if not self._answers or not dispatch.answer.streams:
                raise _no_stream(dispatch.answer)
            self._continuation = continuation
            try:
                last = await self._forward_events(events)
            except UpstreamBroken as second:
                self._count_failure(second)
                dispatch.record_end(second)
                raise
            outcome = "continued"
            usage = events.usage
            return continuation.usage(usage) if usage is not None else None, last
        except (UpstreamBroken, *DISPATCH_ERRORS) as reason:
            outcome = "failed"
            log.warning("request %s: its stream cannot be continued: %s", self._call.request_id, reason)
            raise error from reason
        finally:
            # The events that the client has received count for its API key, even if it leaves.
            if events is not before:
                events.count += before.count
            self._call.events = events
            self._call.runtime.metrics.continuations.labels(outcome).inc()
            spans.describe_continuation(self._span, failed, outcome)

    async def _rest(self) -> tuple[Continuation, bytes | None]:
        """The rest of the stream, and the body of the request for it; None if the answer is already complete.

        Raises NotContinuable.
        """
        endpoint, call = self._endpoint, self._call
        if not isinstance(endpoint, TextEndpoint) or self._recorder is None or not self._answers:
            raise NotContinuable("answers to this request are not continued")
        received = self._recorder.received()
        tokens = await call.runtime.renderer.answer_tokens(received.text)
        continuation = Continuation(endpoint, received, tokens, call.prompt_tokens)
        if received.finished:
            return continuation, None
        body = endpoint.rest_request(call.body.fields, received.text, tokens)
        try:
            return continuation, None if body is None else orjson.dumps({**body, **self._added})
        except orjson.JSONEncodeError as error:  # nested too deeply for the encoder, but not for the decoder
            raise NotContinuable("the request cannot be encoded") from error

    def _complete(self, continuation: Continuation, usage: Usage | None) -> tuple[Usage | None, bytes]:
        """The usage and the last events of an answer to which the failed engine would have added nothing.

        `usage` is what the engine has reported. Without a report, the gateway's counts are used.
        """
        self._dispatch.retried = True  # its times say nothing about the engine
        if usage is None or not usage.completion_tokens:
            usage = continuation.usage(Usage(self._call.prompt_tokens or 0, 0))
        options = self._call.body.fields.get(USAGE_FIELD)
        wanted = isinstance(options, dict) and options.get("include_usage")
        shown = usage if wanted and not continuation.received.usage_sent else None
        return usage, continuation.endpoint.ending(continuation.received, shown)

    async def _commit(self) -> None:
        if self._call.turn is not None and self._answers:
            reference = span_reference(self._call.span)
            pool, url = self._dispatch.pool.name, self._dispatch.replica.url
            await self._call.runtime.turns.commit(self._call.turn, pool, url, reference)

    async def _remember(self, usage: Usage | None) -> None:
        """Record which engine holds the response, if it may be stored, and how long the conversation is now.

        Of a stream, this is recorded as soon as it contains the response's id. A client can therefore retrieve or
        cancel the response once it has read the id.
        """
        if not self._stores or usage is None or usage.response_id is None:
            return
        turn, stored = self._call.turn, StoredResponse(self._dispatch.pool.name, self._dispatch.replica.url)
        if turn is not None and usage.prompt_tokens:
            # The next prompt contains the token that ends a complete answer, so it must not be counted twice.
            ending = 1 if usage.finish_reason == "completed" else 0
            tokens = usage.prompt_tokens + usage.completion_tokens - ending
            stored = StoredResponse(stored.pool, stored.url, turn.session.id.text, turn.prompt.digest, tokens)
        runtime = self._call.runtime
        await runtime.turns.store.remember(runtime.scope(self._call.tenant), usage.response_id, stored)

    async def _record(self, usage: Usage | None) -> None:
        """Record the outcome and the usage. A failure is logged, because the answer itself is not affected."""
        call, dispatch = self._call, self._dispatch
        call.outcome = Outcome.COMPLETE if self._answers else Outcome.FAILED
        if self._answers:
            dispatch.record_success()
        continued = self._continuation is not None
        now = time.perf_counter()
        call.answered_at = now if self._answers else None
        answered = Answered(call, dispatch, self._endpoint.operation, usage, self._first_byte, now, continued)
        try:
            await self._remember(usage)
            await record_answer(answered, self._span)
        except Exception:
            log.exception("request %s: its usage could not be recorded", call.request_id)


def _no_stream(answer: Answer, refused: Rejection | None = None) -> UpstreamFailed:
    message = f"the engine answered {answer.status} without a stream"
    return UpstreamFailed(f"status_{answer.status}", message, refused)


def _check(events: EventRelay) -> None:
    """Raise UpstreamBroken if the engine has reported a failure in its stream."""
    if events.failure is not None:
        raise UpstreamBroken(events.failure.message, "aborted")


def client_headers(answer: Answer) -> CIMultiDict[str]:
    """The headers of an answer for the client. In redirects, the engine's internal address is removed from Location."""
    headers = answer.headers()
    if hdrs.LOCATION in headers:
        parts = urlsplit(headers[hdrs.LOCATION])
        headers[hdrs.LOCATION] = urlunsplit(("", "", parts.path or "/", parts.query, parts.fragment))
    return headers


async def send_complete(call: Call, answer: Answer, content: bytes) -> web.StreamResponse:
    """Send an answer whose body is complete. An engine's error becomes an error object of the endpoint.

    Unlike those of a stream, the headers are sent together with the body, unless it is long.
    """
    headers = client_headers(answer)
    if answer.status >= 400 and len(content) <= MAX_ERROR_BYTES:
        content = call.errors.error_of_engine(answer.status, content)
        headers[hdrs.CONTENT_TYPE] = "application/json"
    response: web.StreamResponse
    if whole := len(content) <= PART_BYTES:
        response = web.Response(status=answer.status, headers=headers, body=content)
    else:
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.content_length = len(content)
    await call.start(response)
    for start in range(0, 0 if whole else len(content), PART_BYTES):
        await call.write(content[start : start + PART_BYTES])
    await call.finish()
    return response
