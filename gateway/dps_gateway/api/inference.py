"""Serving the routed endpoints. `serve` shows the way of a request; `Relay` sends the answer."""

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from aiohttp import web
from opentelemetry.trace import SpanKind

from dps_gateway.api import spans
from dps_gateway.api.body import Body, in_thread_if_large, resolve_model
from dps_gateway.api.call import Call
from dps_gateway.api.dispatch import DISPATCH_ERRORS, Dispatch, find_stored_response, least_loaded
from dps_gateway.api.endpoints.base import Endpoint
from dps_gateway.api.errors import BadRequest, error_event
from dps_gateway.api.outcome import Outcome
from dps_gateway.api.relay import Relay
from dps_gateway.prompt.prefixes import CacheSalt
from dps_gateway.prompt.renderer import Uncountable, total_tokens
from dps_gateway.prompt.volatile import without_volatile_parts
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.session.growth import History
from dps_gateway.telemetry.tracing import fail_span
from dps_gateway.turn import policy_input_of
from dps_gateway.upstream.exchange import SALT_HEADER, Outbound

log = logging.getLogger(__name__)


async def serve(call: Call, endpoint: Endpoint) -> web.StreamResponse:
    """Serve a request of a routed endpoint.

    Raises Unauthorized, Forbidden, KeyBusy, KeyExhausted, Refused, the exceptions of `Dispatch.first`, and
    ConnectionResetError if the client disconnects.
    """
    runtime, model = call.runtime, call.runtime.config.model
    runtime.recent.in_progress.add(call)
    async with call.before_dispatch():
        call.authenticate()
        raw = await call.read()
        body = resolve_model(model, await in_thread_if_large(raw, Body.parse, raw))
        call.body = body = await _without_volatile_parts(call, body)
        if call.key is not None:
            call.key.check_models(body.fields, model.name)
        route_span = runtime.tracing.child(call.span, "dps.route")
        try:
            previous = body.fields.get("previous_response_id") if endpoint.stores else None
            call.stored = await find_stored_response(call, previous) if isinstance(previous, str) else None
            await _measure(call, endpoint)
            call.decision = decision = _decide(call)
            spans.describe_decision(route_span, call, decision)
            call.body, salt_headers = _salted(call, endpoint)
            routing = runtime.config.routing
            added = endpoint.added_fields(
                body.fields, sources=routing.common_prefix_cache, drafts=routing.uses_acceptance
            )
            try:
                encoded = await in_thread_if_large(raw, call.body.with_fields(added).encode)
            except BadRequest:  # it may be serializable without what only the gateway needs
                encoded, added = await in_thread_if_large(raw, call.body.encode), {}
            call.decided_at = time.perf_counter()
        finally:
            route_span.end()
    span = runtime.tracing.child(call.span, f"{endpoint.operation} {model.name}", SpanKind.CLIENT)
    spans.describe_request(span, endpoint.operation, runtime.engine.provider, body.fields, model.name)
    if call.turn is not None:
        spans.describe_conversation(call.span, span, call.turn.session.client_id)
    outbound = Outbound(
        method="POST",
        path=endpoint.path,
        body=encoded,
        headers={**runtime.tracing.propagate(span, call.request.headers), **salt_headers},
        streamed=body.fields.get("stream") is True,
        # The client of a background response needs the id in its first event.
        buffered=body.fields.get("stream") is not True or body.fields.get("background") is not True,
        salt_header=SALT_HEADER if salt_headers and runtime.separates_tenants else None,
        replica=call.stored.url if call.stored is not None else None,
    )
    try:
        if outbound.streamed:
            call.start_heartbeats(endpoint.heartbeat)
        with closing(Dispatch(call, decision, outbound)) as dispatch:
            await dispatch.first()
            return await Relay(call, endpoint, dispatch, span, added).run()
    except Exception as error:
        call.stop_heartbeats()
        fail_span(span, error)
        if call.response is None or not isinstance(error, DISPATCH_ERRORS):
            raise
        call.outcome = Outcome.FAILED  # after a heartbeat
        await call.finish(error_event(error, call.errors))
        return call.response
    finally:
        span.end()


async def _without_volatile_parts(call: Call, body: Body) -> Body:
    """The request without the parts of its system prompts that change with every request."""
    runtime, before = call.runtime, body.fields
    patterns = runtime.config.model.volatile_prompt
    fields, removed = await in_thread_if_large(body.client, without_volatile_parts, before, patterns)
    if not removed:
        return body
    runtime.metrics.volatile_parts.inc(removed)
    return body.with_fields({name: fields[name] for name in fields if fields[name] is not before[name]})


async def _measure(call: Call, endpoint: Endpoint) -> None:
    """Recognise the session of a request with one prompt, and count the tokens in all its prompts, if possible.

    An engine will probably reject a request whose prompts cannot be counted.
    """
    runtime, body, stored = call.runtime, call.body, call.stored
    try:
        prompts = await in_thread_if_large(body.client, endpoint.prompts, runtime.renderer, body.fields)
    except Uncountable as reason:
        log.debug("request %s: its prompt cannot be counted: %s", call.request_id, reason)
        return
    if stored is not None:
        known = stored.session and stored.tokens
        prompts = [prompt.continuing(stored.tokens) for prompt in prompts] if known else []
    if len(prompts) > 1:
        call.prompt_tokens = await total_tokens(prompts)
    elif prompts:
        salt = runtime.cache_salt(call.tenant)
        prompt = prompts[0] if salt is None else prompts[0].in_cache(salt.mark)
        scope, headers = runtime.scope(call.tenant), call.request.headers
        call.turn = await runtime.turns.measure(scope, prompt, headers, body.fields, stored)
        call.prompt_tokens = call.turn.prompt_tokens


def _decide(call: Call) -> Decision:
    """Apply the policy. A request that is not a turn goes to the less loaded pool."""
    runtime, metrics, turn = call.runtime, call.runtime.metrics, call.turn
    if turn is None:
        metrics.history.labels(History.STATELESS.value).inc()
        decision = Decision(least_loaded(runtime.pools), Reason.FIXED, stateless=True)
    else:
        metrics.delta_tokens.observe(turn.delta_tokens)
        metrics.prompt_tokens.observe(turn.prompt_tokens)
        metrics.history.labels(turn.session.growth.history.value).inc()
        call.policy_input = policy_input_of(turn, runtime.pools)
        decision = runtime.policy.decide(call.policy_input)
    if call.stored is None:
        return decision
    return Decision(call.stored.pool, Reason.FIXED, stateless=turn is None)


def _salted(call: Call, endpoint: Endpoint) -> tuple[Body, dict[str, str]]:
    """The body with the tenant's cache salt, and the headers to add if it has no field for it. Raises BadRequest."""
    salt = call.runtime.cache_salt(call.tenant)
    if salt is None:
        return call.body, {}
    if not endpoint.salted:
        return call.body, {SALT_HEADER: salt.of(None)}
    return call.body.with_fields(salted_fields(call.body.fields, endpoint.salted, salt)), {}


def salted_fields(
    body: Mapping[str, Any], fields: Iterable[str], salt: CacheSalt
) -> dict[str, str | list[str]]:
    """The values of `fields` with the tenant's salt.

    A client's own value selects one of the tenant's caches, never another tenant's: its digest replaces it. Raises
    BadRequest if the value is neither a string nor a list of strings.
    """
    salted: dict[str, str | list[str]] = {}
    for name in fields:
        own = body.get(name)
        if own is None or isinstance(own, str):
            salted[name] = salt.of(own)
        elif isinstance(own, list) and all(isinstance(each, str) for each in own):
            # One for each prompt of a batch.
            salted[name] = [salt.of(each) for each in own]
        else:
            raise BadRequest(f"{name} must be a string, or a list of one string for each prompt")
    return salted
