"""An answer on its way to the client, from its first byte to its last, and what is learnt from it."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from opentelemetry.trace import Span

from dps_gateway.api import spans
from dps_gateway.api.dispatch import Placed
from dps_gateway.api.errors import error_event
from dps_gateway.api.request import Route
from dps_gateway.api.usage import EventRelay, Usage, read_usage
from dps_gateway.runtime import Runtime
from dps_gateway.session.record import History
from dps_gateway.telemetry.tracing import fail_span, span_reference
from dps_gateway.turn import MeasuredTurn
from dps_gateway.upstream.exchange import UpstreamBroken

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One request that is being answered. `started` is the clock (seconds) at its arrival."""

    route: Route
    request: web.Request
    span: Span
    body: dict[str, Any]
    request_id: str
    started: float
    turn: MeasuredTurn | None = None
    prompt_tokens: int | None = None
    hide_usage: bool = False
    first_byte: float | None = None

    def headers(self, placed: Placed) -> dict[str, str]:
        """The response headers of the contract."""
        headers = {
            "x-request-id": self.request_id,
            "x-dps-pool": placed.pool.name.value,
            "x-dps-reason": placed.reason.value,
        }
        if self.prompt_tokens is not None:
            headers["x-dps-prompt-tokens"] = str(self.prompt_tokens)
            headers["x-dps-delta-tokens"] = str(self.prompt_tokens)
        if self.turn is None:
            return headers | {"x-dps-history": History.STATELESS.value}
        session = self.turn.session
        return headers | {
            "x-dps-delta-tokens": str(self.turn.delta_tokens),
            "x-dps-turn": str(self.turn.number),
            "x-dps-session": session.id.text,
            "x-dps-state": session.snapshot.source.value,
            "x-dps-history": session.growth.history.value,
        }


async def relay(runtime: Runtime, job: Job, placed: Placed, span: Span) -> web.StreamResponse:
    """Send the answer to the client and take note of it.

    The headers go out before the turn is committed, the last bytes after: a client that has seen a decision knows
    it was this turn's, and one that has seen the end finds it committed wherever it sends its next turn.
    """
    _count(runtime, job, placed)
    response = web.StreamResponse(status=placed.answer.status, headers=placed.answer.headers())
    response.headers.update(job.headers(placed))
    if placed.answer.streams:
        await _relay_stream(runtime, job, placed, span, response)
    else:
        await _relay_whole(runtime, job, placed, span, response)
    return response


def _count(runtime: Runtime, job: Job, placed: Placed) -> None:
    job.first_byte = time.perf_counter()
    pool = placed.pool.name.value
    runtime.metrics.decisions.labels(pool, placed.reason.value).inc()
    if placed.answer.status == 200:
        first = job.first_byte - job.started
        runtime.metrics.time_to_first_token.labels(pool).observe(first)
        runtime.metrics.genai_first_token.labels(job.route.operation, runtime.config.model.name).observe(
            first
        )


async def _relay_whole(
    runtime: Runtime, job: Job, placed: Placed, span: Span, response: web.StreamResponse
) -> None:
    content = placed.whole
    response.content_length = len(content)
    await response.prepare(job.request)
    if placed.answer.status == 200 and content:
        await response.write(content[:-1])
        await _commit(runtime, job, placed)
        await response.write_eof(content[-1:])
        await _account(runtime, job, placed, read_usage(content, job.route.dialect), span)
    else:
        await response.write_eof(content)


async def _relay_stream(
    runtime: Runtime, job: Job, placed: Placed, span: Span, response: web.StreamResponse
) -> None:
    """Pass on events as they come; the closing one waits for the turn's commit."""
    relayed = EventRelay(job.route.dialect, hide_usage=job.hide_usage)
    await response.prepare(job.request)
    events, done = relayed.feed(placed.answer.first)
    await response.write(events)
    commit = asyncio.ensure_future(_commit(runtime, job, placed))
    try:
        async for chunk in placed.answer.rest():
            if done:
                await commit
                await response.write(done)
            events, done = relayed.feed(chunk)
            if events:
                await response.write(events)
        await commit
        await response.write(done + relayed.finish())
        await _account(runtime, job, placed, relayed.usage, span)
    except UpstreamBroken as error:
        log.warning("request %s: %s", job.request_id, error)
        runtime.metrics.upstream_failures.labels(placed.pool.name.value, "broken").inc()
        fail_span(span, error)
        await response.write(error_event(error))
    finally:
        await asyncio.shield(commit)
    await response.write_eof()


async def _commit(runtime: Runtime, job: Job, placed: Placed) -> None:
    if job.turn is not None and placed.answer.status == 200:
        await runtime.turns.commit(job.turn, placed.pool.name, span_reference(job.span))


async def _account(runtime: Runtime, job: Job, placed: Placed, usage: Usage | None, span: Span) -> None:
    """Take the engine's own figures into metrics, spans and the session's record."""
    metrics, pool, operation = runtime.metrics, placed.pool, job.route.operation
    model = runtime.config.model.name
    ended = time.perf_counter()
    metrics.genai_duration.labels(operation, model).observe(ended - job.started)
    if usage is None or job.first_byte is None:
        return
    first_chunk = job.first_byte - job.started if placed.answer.streams else None
    spans.describe_usage(span, usage, first_chunk)
    metrics.genai_token_usage.labels(operation, model, "input").observe(usage.prompt_tokens)
    metrics.genai_token_usage.labels(operation, model, "output").observe(usage.completion_tokens)
    metrics.cached_tokens.labels(pool.name.value).inc(usage.cached_tokens or 0)
    per_token = None
    if placed.answer.streams and usage.completion_tokens > 1:
        per_token = (ended - job.first_byte) / (usage.completion_tokens - 1)
        metrics.time_per_output_token.labels(pool.name.value).observe(per_token)
    pool.observe(first_chunk, per_token)
    if job.turn is None or not usage.prompt_tokens:
        return
    if await runtime.turns.correct(job.turn, pool.name, usage.prompt_tokens, usage.cached_tokens):
        metrics.token_count_mismatch.inc()
        counted, told = job.turn.prompt_tokens, usage.prompt_tokens
        log.warning("request %s: counted %d prompt tokens, the engine %d", job.request_id, counted, told)
