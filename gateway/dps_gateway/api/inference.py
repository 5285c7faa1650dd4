"""The routed endpoints: chat, completions and SGLang's /generate, from a request to its last byte."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from aiohttp import web
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from dps_gateway.api.dispatch import Placed, place
from dps_gateway.api.errors import (
    BadRequest,
    BodyTooLarge,
    Draining,
    error_event,
    error_response,
    is_expected,
)
from dps_gateway.api.usage import Dialect, EventRelay, Usage, read_usage
from dps_gateway.prompt.accounting import Accountant, Prompt, Uncountable
from dps_gateway.routing.decision import Decision, Pool, Reason
from dps_gateway.runtime import Runtime
from dps_gateway.session.record import History
from dps_gateway.telemetry import spans
from dps_gateway.telemetry.tracing import links_to, span_reference
from dps_gateway.turn import MeasuredTurn, decide
from dps_gateway.upstream.exchange import UpstreamBroken, forwarded_headers

log = logging.getLogger(__name__)

RUNTIME: Final = web.AppKey("runtime", Runtime)

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/generate"

_ASK_FOR_USAGE: Final = b'"stream_options":{"include_usage":true},'


@dataclass(frozen=True, slots=True)
class Route:
    """A routed endpoint: what OpenTelemetry calls its operation, and how its answers speak of usage."""

    path: str
    operation: str
    dialect: Dialect


def prompts_of(path: str, body: dict[str, Any]) -> list[Any] | None:
    """The prompts of a request, each a string or a list of token ids; None for a chat."""
    if path == CHAT:
        return None
    given = body.get("prompt")
    if path == GENERATE:
        given = body["text"] if body.get("text") is not None else body.get("input_ids")
    return given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]


ROUTES: Final = (
    Route(CHAT, "chat", "openai"),
    Route(COMPLETIONS, "text_completion", "openai"),
    Route(GENERATE, "text_completion", "native"),
)


@dataclass(slots=True)
class Job:
    """One request while it is being answered."""

    route: Route
    request: web.Request
    span: Span
    body: dict[str, Any]
    raw: bytes
    request_id: str
    started: float
    turn: MeasuredTurn | None = None
    prompt_tokens: int | None = None
    decision: Decision = field(default_factory=lambda: Decision(Pool.GREEDY, Reason.FIXED))
    hide_usage: bool = False
    first_byte: float | None = None

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True

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


def routed(route: Route) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
    """The handler of a routed endpoint."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await _serve(route, request)

    return handler


async def _serve(route: Route, request: web.Request) -> web.StreamResponse:
    runtime = request.app[RUNTIME]
    started = time.perf_counter()
    request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
    span = runtime.tracing.server_span(route.path, request.headers)
    status = 499  # the client left, unless something else happens
    try:
        response = await _answer(runtime, route, request, span, request_id, started)
        status = response.status
        return response
    except ConnectionResetError:  # noticed while writing to it
        return web.Response(status=status)
    except Exception as error:
        if not is_expected(error):
            log.exception("request %s failed", request_id)
        refusal = error_response(error)
        refusal.headers["x-request-id"] = request_id
        status = refusal.status
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
        return refusal
    finally:
        runtime.metrics.requests.labels(route.path, str(status)).inc()
        span.set_attribute("http.response.status_code", status)
        span.end()


async def _answer(
    runtime: Runtime, route: Route, request: web.Request, span: Span, request_id: str, started: float
) -> web.StreamResponse:
    if runtime.draining:
        raise Draining("this replica is shutting down; try again")
    tenant = runtime.tenant(request.headers)
    raw = await read_body(request)
    job = Job(route, request, span, parse_object(raw), raw, request_id, started)
    await _decide(runtime, job, tenant)
    body = _with_usage_asked(job)
    upstream_span = runtime.tracing.child(
        span, f"{route.operation} {runtime.config.model.name}", SpanKind.CLIENT
    )
    spans.describe_request(upstream_span, route.operation, job.body, runtime.config.model.name)
    if job.turn is not None:
        spans.describe_conversation(span, upstream_span, job.turn.session.client_id)
    placed: Placed | None = None
    try:
        trace = runtime.tracing.propagate(upstream_span, request.headers)
        placed = await place(
            runtime,
            job.decision,
            job.turn.session.id.text if job.turn else None,
            route.path,
            body,
            lambda api_key: forwarded_headers(request.headers, api_key, trace, request_id),
            started,
            whole=True,
        )
        spans.describe_placement(upstream_span, placed.replica.url, placed.pool.name, placed.reason)
        _count(runtime, job, placed)
        if placed.answer.streams:
            return await _relay_stream(runtime, job, placed, upstream_span)
        return await _relay_whole(runtime, job, placed, upstream_span)
    except Exception as error:
        upstream_span.set_attribute("error.type", type(error).__name__)
        upstream_span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        if placed is not None:
            placed.close()
        upstream_span.end()


async def _decide(runtime: Runtime, job: Job, tenant: str) -> None:
    """Measure the turn and ask the policy. A prompt that nobody can count goes where least is going on."""
    span = runtime.tracing.child(job.span, "dps.route")
    try:
        prompt = _prompt(runtime.accountant, job)
        if prompt is not None:
            scope = runtime.scope(tenant)
            job.turn = turn = await runtime.turns.measure(scope, prompt, job.request.headers, job.body)
            job.prompt_tokens = turn.prompt_tokens
            job.decision = decide(runtime.policy, turn, runtime.pools, _max_output_tokens(job.body))
            runtime.metrics.delta_tokens.observe(turn.delta_tokens)
            runtime.metrics.prompt_tokens.observe(turn.prompt_tokens)
            runtime.metrics.history.labels(turn.session.growth.history.value).inc()
            if turn.session.base.span:
                for link in links_to(turn.session.base.span):
                    job.span.add_link(link.context, link.attributes)
        else:
            job.decision = Decision(least_loaded(runtime), Reason.FIXED)
            runtime.metrics.history.labels(History.STATELESS.value).inc()
        spans.describe_decision(
            span, job.span, job.turn, job.decision, runtime.config.routing.threshold_tokens
        )
    finally:
        span.end()


def _prompt(accountant: Accountant, job: Job) -> Prompt | None:
    """The request's one prompt; None for several at once, or one that the engine will refuse."""
    prompts = prompts_of(job.route.path, job.body)
    # SGLang answers an empty prompt with an assertion that ends the engine, where it does not refuse it.
    if prompts is not None and any(prompt in ("", []) for prompt in prompts):
        raise BadRequest("a prompt is empty: give every prompt at least one character or token id")
    try:
        if prompts is None:
            return accountant.chat(job.body)
        if len(prompts) == 1:
            return accountant.text(prompts[0])
        job.prompt_tokens = accountant.total(prompts)
    except Uncountable as reason:
        log.debug("request %s has no countable prompt: %s", job.request_id, reason)
    return None


def least_loaded(runtime: Runtime) -> Pool:
    """The pool with the fewest requests a ready replica."""

    def load(pool: Pool) -> float:
        ready = len(runtime.pools[pool].ready)
        return runtime.pools[pool].in_flight / ready if ready else float("inf")

    return min(Pool.GREEDY, Pool.SPECULATIVE, key=load)


def _with_usage_asked(job: Job) -> bytes:
    """The request's bytes, with the usage of a stream asked for where the client has not."""
    if job.route.dialect != "openai" or not job.streams:
        return job.raw
    options = job.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        return job.raw
    job.hide_usage = True
    if "stream_options" in job.body:
        wanted = (options if isinstance(options, dict) else {}) | {"include_usage": True}
        return orjson.dumps(job.body | {"stream_options": wanted})
    start = job.raw.index(b"{") + 1
    return job.raw[:start] + _ASK_FOR_USAGE + job.raw[start:]


def _max_output_tokens(body: dict[str, Any]) -> int | None:
    sampling = body.get("sampling_params")
    nested = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    value = body.get("max_completion_tokens") or body.get("max_tokens") or nested
    return value if isinstance(value, int) else None


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


async def _relay_whole(runtime: Runtime, job: Job, placed: Placed, span: Span) -> web.StreamResponse:
    """Pass on an answer that is complete.

    The headers go out before the turn is committed, its last byte after: a client that has seen a decision knows
    it was this turn's, and one that has seen the end finds it committed wherever it sends its next turn.
    """
    content = placed.whole
    response = web.StreamResponse(status=placed.answer.status, headers=placed.answer.headers())
    response.headers.update(job.headers(placed))
    response.content_length = len(content)
    await response.prepare(job.request)
    if placed.answer.status == 200 and content:
        await response.write(content[:-1])
        await _commit(runtime, job, placed)
        await response.write_eof(content[-1:])
        await _account(runtime, job, placed, read_usage(content, job.route.dialect), span)
    else:
        await response.write_eof(content)
    return response


async def _relay_stream(runtime: Runtime, job: Job, placed: Placed, span: Span) -> web.StreamResponse:
    """Pass on events as they come; the closing one waits for the turn's commit, as in `_relay_whole`."""
    response = web.StreamResponse(status=placed.answer.status, headers=placed.answer.headers())
    response.headers.update(job.headers(placed))
    relay = EventRelay(job.route.dialect, hide_usage=job.hide_usage)
    await response.prepare(job.request)
    events, done = relay.feed(placed.answer.first)
    await response.write(events)
    commit = asyncio.ensure_future(_commit(runtime, job, placed))
    try:
        async for chunk in placed.answer.rest():
            if done:
                await commit
                await response.write(done)
            events, done = relay.feed(chunk)
            if events:
                await response.write(events)
        await commit
        await response.write(done + relay.finish())
        await _account(runtime, job, placed, relay.usage, span)
    except UpstreamBroken as error:
        log.warning("request %s: %s", job.request_id, error)
        runtime.metrics.upstream_failures.labels(placed.pool.name.value, "broken").inc()
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
        await response.write(error_event(error))
    finally:
        await asyncio.shield(commit)
    await response.write_eof()
    return response


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
    spans.describe_usage(span, usage, job.first_byte - job.started)
    metrics.genai_token_usage.labels(operation, model, "input").observe(usage.prompt_tokens)
    metrics.genai_token_usage.labels(operation, model, "output").observe(usage.completion_tokens)
    metrics.cached_tokens.labels(pool.name.value).inc(usage.cached_tokens or 0)
    per_token = None
    if placed.answer.streams and usage.completion_tokens > 1:
        per_token = (ended - job.first_byte) / (usage.completion_tokens - 1)
        metrics.time_per_output_token.labels(pool.name.value).observe(per_token)
    pool.observe(job.first_byte - job.started if placed.answer.streams else None, per_token)
    if job.turn is None or not usage.prompt_tokens:
        return
    if await runtime.turns.correct(job.turn, pool.name, usage.prompt_tokens, usage.cached_tokens):
        metrics.token_count_mismatch.inc()
        counted, told = job.turn.prompt_tokens, usage.prompt_tokens
        log.warning("request %s: counted %d prompt tokens, the engine %d", job.request_id, counted, told)


async def read_body(request: web.Request) -> bytes:
    """The request's bytes. Raises BodyTooLarge."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        limit = request.app[RUNTIME].config.limits.max_body_bytes
        raise BodyTooLarge(f"the request is larger than {limit} bytes (limits.maxBodyBytes)") from error


def parse_object(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises BadRequest."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body
