"""Sending an engine's answer to the client, and recording the usage that it reports."""

import asyncio
import logging
import time
from typing import Final

from aiohttp import web
from opentelemetry.trace import Span

from dps_gateway.api import spans
from dps_gateway.api.continuation import Continuation, Received
from dps_gateway.api.dispatch import DISPATCH_ERRORS, Dispatch, Placed
from dps_gateway.api.errors import error_event
from dps_gateway.api.outcome import record_outcome
from dps_gateway.api.response import client_headers, send_complete
from dps_gateway.api.routed_request import RoutedRequest
from dps_gateway.api.sse import EventRelay
from dps_gateway.api.stored_responses import remember
from dps_gateway.engine.dialect import RequestedByGateway, Usage, read_usage
from dps_gateway.engine.sources import PromptSources, prompt_sources, without_sources
from dps_gateway.engine.stream_content import Different
from dps_gateway.telemetry.tracing import fail_span, span_reference
from dps_gateway.upstream.exchange import Answer, UpstreamBroken, UpstreamFailed

log = logging.getLogger(__name__)

MAX_ENDING_BYTES: Final = 1024 * 1024
"""What an engine sends after the closing event of a stream is held in memory up to this size. The rest is dropped."""


class Relay:
    """One answer of a routed endpoint on its way to the client.

    The last bytes are sent after the turn has been committed. A client that has read the complete answer can therefore
    rely on the commit, whichever gateway replica receives its next turn. The rest of a stream does not wait for it.

    If the engine of a stream fails and the request is deterministic, the answer of another one continues the stream.
    """

    def __init__(
        self,
        routed: RoutedRequest,
        dispatch: Dispatch,
        placed: Placed,
        span: Span,
        requested: RequestedByGateway,
    ) -> None:
        self._routed = routed
        self._call = routed.call
        self._runtime = routed.call.runtime
        self._dispatch = dispatch
        self._placed = placed
        self._span = span
        """The CLIENT span of the upstream request."""
        self._requested = requested
        self._model = self._runtime.config.model.name
        self._first_byte = time.perf_counter()
        self._registered = False
        """Whether the engine that holds a streamed response has been recorded."""
        content = routed.route.stream_content
        comparable = content is not None and content.deterministic(routed.body)
        self._received = Received(content) if content is not None and comparable else None
        """What the client has received of a stream; None if it cannot be compared with another answer."""
        self._continuation: Continuation | None = None
        """The part of another engine's answer that continues the stream; None while the first engine answers."""

    @property
    def _answer(self) -> Answer:
        return self._placed.answer

    def close(self) -> None:
        """Release the connection to the engine and its slot."""
        self._placed.close()

    async def run(self) -> web.StreamResponse:
        """Send the whole answer. Raises ConnectionResetError if the client disconnects."""
        self._describe_placement()
        self._count_start()
        return await (self._send_stream() if self._answer.streams else self._send_whole())

    def _describe_placement(self) -> None:
        placed = self._placed
        spans.describe_placement(
            self._span, placed.replica.url, placed.pool.name, placed.reason, placed.answer.status
        )

    def _count_start(self) -> None:
        metrics, pool = self._runtime.metrics, self._placed.pool.name.value
        metrics.decisions.labels(pool, self._placed.reason.value).inc()
        if self._answer.status == 200:
            self._placed.pool.record_token(self._placed.replica)
            seconds = self._first_byte - self._call.started
            metrics.time_to_first_token.labels(pool).observe(seconds)
            metrics.genai_first_token.labels(self._routed.route.operation, self._model).observe(seconds)

    async def _send_whole(self) -> web.StreamResponse:
        content = self._placed.content
        if self._answer.status == 200 and content:
            await self._commit()
            await self._account(read_usage(content, self._routed.route.answers))
            content = without_sources(content) if self._requested.sources else content
        # The engine has finished. A client that reads slowly does not occupy its slot.
        self._placed.close()
        return await send_complete(self._call, self._answer, content)

    async def _send_stream(self) -> web.StreamResponse:
        """Forward events as they arrive; the closing one waits for the commit."""
        call = self._call
        response = web.StreamResponse(status=self._answer.status, headers=client_headers(self._answer))
        call.events = events = EventRelay(self._routed.route.answers, self._requested)
        await call.start(response)
        ready, closing = events.feed(self._answer.first)
        await self._register(events)
        await self._write(ready)
        commit = asyncio.ensure_future(self._commit())
        try:
            try:
                last = await self._forward_events(events, closing)
            except UpstreamBroken as error:
                log.warning("request %s: %s", call.request_id, error)
                self._count_failure()
                events, last = await self._continue(events, error)
            await commit
            if self._continuation is not None:
                await self._commit()  # the replica that has continued the stream holds the prompt, too
            await self._account(events.usage)
        except UpstreamBroken as error:
            fail_span(self._span, error)
            last = error_event(error, call.errors)
        finally:
            await asyncio.shield(commit)
        await call.finish(last)
        return response

    async def _forward_events(self, events: EventRelay, closing: bytes) -> bytes:
        """Forward all events but the closing one, which is returned.

        Raises UpstreamBroken if the stream ends without a closing event. If the engine closes the connection after
        the closing event, or does not stop sending, the answer is complete.
        """
        try:
            async for chunk in self._answer.rest():
                self._placed.pool.record_token(self._placed.replica)
                ready, done = events.feed(chunk)
                if closing:  # nothing may overtake the closing event, which waits for the commit
                    closing += ready + done
                    if len(closing) > MAX_ENDING_BYTES:
                        break
                else:
                    closing = done
                    await self._register(events)
                    await self._write(ready)
        except UpstreamBroken:
            if not closing:
                raise
        if not closing and self._answer.status == 200:
            ending = self._routed.route.answers.closing[0].decode().partition(": ")[2]
            raise UpstreamBroken(f"the engine ended the stream without {ending}")
        return closing + events.finish()

    async def _write(self, events: bytes) -> None:
        """Send the events that the client has not received. Raises Different if the answer is not the same."""
        if self._continuation is not None:
            events = self._continuation.feed(events)
        elif self._received is not None:
            self._received.add(events)
        await self._call.write(events)

    def _count_failure(self) -> None:
        self._runtime.metrics.upstream_failures.labels(self._placed.pool.name.value, "broken").inc()

    async def _continue(self, before: EventRelay, error: UpstreamBroken) -> tuple[EventRelay, bytes]:
        """Continue the stream, which failed with `error`, with the answer of another engine.

        `before` are the events of the engine that failed. Returns the events of the other engine and the closing one.
        Raises `error` if the stream cannot be continued.
        """
        continuation = self._received.continuation() if self._received is not None else None
        if continuation is None or self._answer.status != 200:
            self._dispatch.record_end(self._placed, error)
            raise error
        failed, outcome = self._placed.replica.url, "abandoned"
        events = EventRelay(self._routed.route.answers, self._requested)
        try:
            self._placed = await self._dispatch.again(self._placed, error)
            last = await self._forward_new(continuation, events)
            outcome = "continued"
            return events, last
        except (Different, UpstreamBroken, *DISPATCH_ERRORS) as reason:
            outcome = "different" if isinstance(reason, Different) else "failed"
            log.warning("request %s: its stream cannot be continued: %s", self._call.request_id, reason)
            raise error from reason
        finally:
            # The events that the client has received count for its API key, even if it leaves.
            self._call.events = max(before, events, key=lambda each: each.count)
            self._runtime.metrics.continuations.labels(outcome).inc()
            spans.describe_continuation(self._span, failed, outcome)

    async def _forward_new(self, continuation: Continuation, events: EventRelay) -> bytes:
        """Forward what the client has not received of the present answer, except for the closing event, which is
        returned.

        Raises Different if the client has received the beginning of another answer, UpstreamFailed if the answer is no
        stream, and UpstreamBroken.
        """
        self._describe_placement()
        status = self._answer.status
        if status != 200 or not self._answer.streams:
            raise UpstreamFailed(f"status_{status}", f"the engine answered {status} without a stream")
        self._continuation = continuation
        try:
            ready, closing = events.feed(self._answer.first)
            await self._write(ready)
            last = await self._forward_events(events, closing)
        except UpstreamBroken:
            self._count_failure()
            raise
        if not continuation.caught_up:
            raise Different("the answer of the other engine is shorter")
        return last

    async def _commit(self) -> None:
        if self._routed.turn is not None and self._answer.status == 200:
            reference = span_reference(self._call.span)
            pool, url = self._placed.pool.name, self._placed.replica.url
            await self._runtime.turns.commit(self._routed.turn, pool, url, reference)

    async def _register(self, events: EventRelay) -> None:
        """Record which engine holds the response as soon as the stream contains its id.

        A client can therefore retrieve or cancel the response once it has read the id.
        """
        if self._registered or not self._routed.stores or self._answer.status != 200:
            return
        usage = events.usage
        if usage is not None:
            self._registered = True
            await remember(self._call, self._placed, self._routed.turn, usage, complete=False)

    async def _account(self, usage: Usage | None) -> None:
        """Record the engine's token counts. A failure is logged, because the answer itself is not affected."""
        try:
            if self._routed.stores and usage is not None:
                await remember(self._call, self._placed, self._routed.turn, usage)
            await self._record(usage)
        except Exception:
            log.exception("request %s: its usage could not be recorded", self._call.request_id)

    async def _record(self, usage: Usage | None) -> None:
        """Add the engine's token counts to metrics, the span and the session's record."""
        metrics, pool = self._runtime.metrics, self._placed.pool
        labels = (self._routed.route.operation, self._model)
        ended = time.perf_counter()
        metrics.genai_duration.labels(*labels).observe(ended - self._call.started)
        if usage is None or not usage.prompt_tokens:
            return
        self._call.usage = usage
        first_chunk = self._first_byte - self._call.started if self._answer.streams else None
        common = self._runtime.config.routing.common_prefix_cache
        sources = prompt_sources(usage, common)
        spans.describe_usage(self._span, usage, first_chunk, sources if common else None)
        self._count_sources(sources)
        metrics.genai_token_usage.labels(*labels, "input").observe(usage.prompt_tokens)
        metrics.genai_token_usage.labels(*labels, "output").observe(usage.completion_tokens)
        metrics.cached_tokens.labels(pool.name.value).inc(usage.cached_tokens or 0)
        if usage.several:  # sums show neither the engine's speed nor the length of the session's prompt
            return
        per_token = None
        continued = self._continuation is not None
        if self._answer.streams and usage.completion_tokens > 1 and not continued:
            per_token = (ended - self._first_byte) / (usage.completion_tokens - 1)
            metrics.time_per_output_token.labels(pool.name.value).observe(per_token)
        if not continued:
            pool.observe(first_chunk, per_token)
        record_outcome(self._routed, self._placed, usage, self._first_byte, ended)
        await self._correct(usage)

    def _count_sources(self, sources: PromptSources | None) -> None:
        if sources is None:
            return
        metrics, pool = self._runtime.metrics, self._placed.pool.name
        for name in ("held", "fetched", "computed"):
            metrics.prompt_sources.labels(pool.value, name).inc(getattr(sources, name))
        if self._routed.turn is not None:
            replica = self._placed.replica
            fetchable = self._routed.turn.cached.tokens(replica.id, replica.units).fetchable
            metrics.fetchable_tokens.labels(pool.value).inc(fetchable)

    async def _correct(self, usage: Usage) -> None:
        turn, replica = self._routed.turn, self._placed.replica
        if turn is None or not usage.prompt_tokens:
            return
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.fetched_tokens)
        if await self._runtime.turns.correct(turn, replica.url, *counts, replica.units):
            self._runtime.metrics.token_count_mismatch.inc()
            log.warning(
                "request %s: the gateway counted %d prompt tokens, the engine %d",
                self._call.request_id,
                turn.prompt_tokens,
                usage.prompt_tokens,
            )
