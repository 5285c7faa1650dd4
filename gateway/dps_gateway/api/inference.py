"""The routed endpoints: chat, completions and SGLang's /generate, from a request to its placement."""

import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web
from opentelemetry.trace import Span, SpanKind

from dps_gateway.api import spans
from dps_gateway.api.answer import Job, relay
from dps_gateway.api.dispatch import Placed, least_loaded, place
from dps_gateway.api.errors import BadRequest, refusal
from dps_gateway.api.request import (
    RUNTIME,
    Route,
    max_output_tokens,
    parse_object,
    prompts_of,
    read_body,
    request_id_of,
    with_usage_asked,
)
from dps_gateway.prompt.accounting import Accountant, Prompt, Uncountable
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.runtime import Runtime
from dps_gateway.session.record import History
from dps_gateway.telemetry.tracing import end_server_span, fail_span, links_to
from dps_gateway.turn import decide
from dps_gateway.upstream.exchange import forwarded_headers

log = logging.getLogger(__name__)


def routed(route: Route) -> Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]:
    """The handler of a routed endpoint."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await _serve(route, request)

    return handler


async def _serve(route: Route, request: web.Request) -> web.StreamResponse:
    runtime = request.app[RUNTIME]
    started = time.perf_counter()
    request_id = request_id_of(request)
    span = runtime.tracing.server_span(request.method, route.path, request.headers)
    status = 499  # the client left, unless something else happens
    failure: Exception | None = None
    try:
        response: web.StreamResponse = await _answer(runtime, route, request, span, request_id, started)
        status = response.status
        return response
    except ConnectionResetError:  # noticed while writing to it
        return web.Response(status=status)
    except Exception as error:
        failure = error
        response = refusal(error, request_id)
        status = response.status
        return response
    finally:
        runtime.metrics.requests.labels(route.path, str(status)).inc()
        end_server_span(span, status, failure)


async def _answer(
    runtime: Runtime, route: Route, request: web.Request, span: Span, request_id: str, started: float
) -> web.StreamResponse:
    tenant = runtime.tenant(request.headers)
    raw = await read_body(request)
    job = Job(route, request, span, parse_object(raw), request_id, started)
    decision = await _decide(runtime, job, tenant)
    body, job.hide_usage = with_usage_asked(route, job.body, raw)
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
            decision,
            job.turn.session.id.text if job.turn else None,
            route.path,
            body,
            lambda api_key: forwarded_headers(request.headers, api_key, trace, request_id),
            started,
            whole=True,
        )
        status = placed.answer.status
        spans.describe_placement(upstream_span, placed.replica.url, placed.pool.name, placed.reason, status)
        return await relay(runtime, job, placed, upstream_span)
    except Exception as error:
        fail_span(upstream_span, error)
        raise
    finally:
        if placed is not None:
            placed.close()
        upstream_span.end()


async def _decide(runtime: Runtime, job: Job, tenant: str) -> Decision:
    """Measure the turn and ask the policy. A prompt that nobody can count goes where least is going on."""
    span = runtime.tracing.child(job.span, "dps.route")
    try:
        prompt = _prompt(runtime.accountant, job)
        if prompt is not None:
            scope = runtime.scope(tenant)
            job.turn = turn = await runtime.turns.measure(scope, prompt, job.request.headers, job.body)
            job.prompt_tokens = turn.prompt_tokens
            decision = decide(runtime.policy, turn, runtime.pools, max_output_tokens(job.body))
            runtime.metrics.delta_tokens.observe(turn.delta_tokens)
            runtime.metrics.prompt_tokens.observe(turn.prompt_tokens)
            runtime.metrics.history.labels(turn.session.growth.history.value).inc()
            if job.span.is_recording():
                for link in links_to(turn.session.base.span):
                    job.span.add_link(link.context, link.attributes)
        else:
            decision = Decision(least_loaded(runtime), Reason.FIXED)
            runtime.metrics.history.labels(History.STATELESS.value).inc()
        threshold = runtime.config.routing.threshold_tokens
        spans.describe_decision(span, job.span, job.request_id, job.turn, decision, threshold)
        return decision
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
