"""Sending an engine's answer to the client, and recording what it reports."""

import asyncio
import logging
import time

from aiohttp import web
from opentelemetry.trace import Span

from dps_gateway.api import spans
from dps_gateway.api.dispatch import Placed, placement_headers
from dps_gateway.api.errors import error_event
from dps_gateway.api.job import Job
from dps_gateway.api.sse import EventRelay
from dps_gateway.engine.dialect import Usage, read_usage
from dps_gateway.telemetry.tracing import fail_span, span_reference
from dps_gateway.upstream.exchange import UpstreamBroken

log = logging.getLogger(__name__)


class Relay:
    """One answer of a routed endpoint on its way to the client.

    The headers are sent before the turn is committed, the last bytes after. A client that has read the complete
    answer can therefore rely on the commit, whichever gateway replica receives its next turn.
    """

    def __init__(self, job: Job, placed: Placed, span: Span, *, hide_usage: bool) -> None:
        self._job = job
        self._call = job.call
        self._runtime = job.call.runtime
        self._placed = placed
        self._answer = placed.answer
        self._span = span
        """The CLIENT span of the upstream request."""
        self._hide_usage = hide_usage
        self._model = self._runtime.config.model.name
        self._first_byte = time.perf_counter()

    async def run(self) -> web.StreamResponse:
        """Send the whole answer. Raises ConnectionResetError if the client disconnects."""
        self._count_start()
        response = web.StreamResponse(status=self._answer.status, headers=self._answer.headers())
        response.headers.update(placement_headers(self._call, self._placed) | self._job.headers())
        if self._answer.streams:
            await self._send_stream(response)
        else:
            await self._send_whole(response)
        return response

    def _count_start(self) -> None:
        metrics, pool = self._runtime.metrics, self._placed.pool.name.value
        metrics.decisions.labels(pool, self._placed.reason.value).inc()
        if self._answer.status == 200:
            seconds = self._first_byte - self._call.started
            metrics.time_to_first_token.labels(pool).observe(seconds)
            metrics.genai_first_token.labels(self._job.route.operation, self._model).observe(seconds)

    async def _send_whole(self, response: web.StreamResponse) -> None:
        content = self._placed.content
        response.content_length = len(content)
        await response.prepare(self._call.request)
        if self._answer.status == 200 and content:
            await response.write(content[:-1])
            await self._commit()
            await response.write_eof(content[-1:])
            await self._account(read_usage(content, self._job.route.answers))
        else:
            await response.write_eof(content)

    async def _send_stream(self, response: web.StreamResponse) -> None:
        """Forward events as they arrive; the closing one waits for the commit."""
        events = EventRelay(self._job.route.answers, hide_usage=self._hide_usage)
        await response.prepare(self._call.request)
        ready, closing = events.feed(self._answer.first)
        await response.write(ready)
        commit = asyncio.ensure_future(self._commit())
        try:
            async for chunk in self._answer.rest():
                if closing:
                    await commit
                    await response.write(closing)
                ready, closing = events.feed(chunk)
                if ready:
                    await response.write(ready)
            await commit
            await response.write(closing + events.finish())
            await self._account(events.usage)
        except UpstreamBroken as error:
            log.warning("request %s: %s", self._call.request_id, error)
            self._runtime.metrics.upstream_failures.labels(self._placed.pool.name.value, "broken").inc()
            fail_span(self._span, error)
            await response.write(error_event(error))
        finally:
            await asyncio.shield(commit)
        await response.write_eof()

    async def _commit(self) -> None:
        if self._job.turn is not None and self._answer.status == 200:
            reference = span_reference(self._call.span)
            await self._runtime.turns.commit(self._job.turn, self._placed.pool.name, reference)

    async def _account(self, usage: Usage | None) -> None:
        """Record the engine's token counts in metrics, the span and the session's record."""
        metrics, pool = self._runtime.metrics, self._placed.pool
        labels = (self._job.route.operation, self._model)
        ended = time.perf_counter()
        metrics.genai_duration.labels(*labels).observe(ended - self._call.started)
        if usage is None:
            return
        first_chunk = self._first_byte - self._call.started if self._answer.streams else None
        spans.describe_usage(self._span, usage, first_chunk)
        metrics.genai_token_usage.labels(*labels, "input").observe(usage.prompt_tokens)
        metrics.genai_token_usage.labels(*labels, "output").observe(usage.completion_tokens)
        metrics.cached_tokens.labels(pool.name.value).inc(usage.cached_tokens or 0)
        per_token = None
        if self._answer.streams and usage.completion_tokens > 1:
            per_token = (ended - self._first_byte) / (usage.completion_tokens - 1)
            metrics.time_per_output_token.labels(pool.name.value).observe(per_token)
        pool.observe(first_chunk, per_token)
        await self._correct(usage)

    async def _correct(self, usage: Usage) -> None:
        turn, pool = self._job.turn, self._placed.pool.name
        if turn is None or not usage.prompt_tokens:
            return
        if await self._runtime.turns.correct(turn, pool, usage.prompt_tokens, usage.cached_tokens):
            self._runtime.metrics.token_count_mismatch.inc()
            log.warning(
                "request %s: the gateway counted %d prompt tokens, the engine %d",
                self._call.request_id,
                turn.prompt_tokens,
                usage.prompt_tokens,
            )
