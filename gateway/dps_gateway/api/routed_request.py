"""Preparing a client's request: from its headers and body to a routing decision."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span

from dps_gateway.api import spans
from dps_gateway.api.cache_salt import SALT_HEADER, with_salt
from dps_gateway.api.call import Call
from dps_gateway.api.dispatch import least_loaded
from dps_gateway.api.endpoints.route import Route
from dps_gateway.api.long_bodies import off_loop
from dps_gateway.api.model_names import resolve_model
from dps_gateway.api.request import parse_object
from dps_gateway.api.stored_responses import holder
from dps_gateway.pool import Pool
from dps_gateway.prompt.accounting import Prompt, Uncountable, total_tokens
from dps_gateway.prompt.separation import CacheSalt
from dps_gateway.routing.decision import Decision, PolicyInput, Reason
from dps_gateway.session.growth import History
from dps_gateway.session.stored_responses import StoredResponse
from dps_gateway.telemetry.tracing import links_to
from dps_gateway.turn import MeasuredTurn, policy_input_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request to a routed endpoint after its routing decision."""

    call: Call
    route: Route
    body: dict[str, Any]
    raw: bytes
    """The request as the client sent it, but with the tenant's cache salt; `body` is the same, parsed."""
    headers: Mapping[str, str]
    """Headers to add for the engine: the tenant's cache salt if the request has no field for it."""
    decision: Decision
    prompt_tokens: int | None
    """L_t, or the sum over several prompts. None if the prompts cannot be counted."""
    turn: MeasuredTurn | None
    """None for a request that is not a turn of a session."""
    policy_input: PolicyInput | None
    """The policy's input, for a turn."""
    decided_at: float
    """`time.perf_counter()` at the routing decision."""
    stored: StoredResponse | None = None
    """The stored response that the request continues, if any. Only its engine can serve the request."""

    @property
    def stores(self) -> bool:
        """Whether the engine may store the answer."""
        return self.route.stores and self.body.get("store") is not False

    @property
    def session(self) -> str | None:
        """The session id that determines the preferred replica."""
        return self.turn.session.affinity if self.turn is not None else None


async def prepare(call: Call, route: Route) -> RoutedRequest:
    """Authenticate and parse the request, measure its turn, and decide where to send it.

    Raises Unauthorized, Forbidden, KeyBusy, KeyExhausted, ModelNotFound, ResponseNotFound, PoolEmpty, BadRequest, and
    the exceptions of `Call.body`.
    """
    runtime = call.runtime
    call.authenticate()
    raw = await call.body()
    body = await off_loop(raw, parse_object, raw)
    raw, body = await off_loop(raw, resolve_model, runtime.config.model, raw, body)
    if call.key is not None:
        call.key.check_models(body, runtime.config.model.name)
    salt = runtime.cache_salt(call.tenant)
    span = runtime.tracing.child(call.span, "dps.route")
    try:
        stored = await _continued(call, route, body)
        prompts = await _countable_prompts(call, route, raw, body, stored)
        turn, prompt_tokens = await _measure(call, body, prompts, salt, stored)
        policy_input = policy_input_of(turn, runtime.pools) if turn is not None else None
        decision = _decide(call, turn, policy_input)
        if stored is not None:
            decision = Decision(stored.pool, Reason.FIXED)
        call.headers |= _headers(turn, prompt_tokens, decision)
        _describe(call, span, turn, policy_input, decision)
        raw, body, headers = await _salted(route, raw, body, salt)
        decided_at = time.perf_counter()
        return RoutedRequest(
            call, route, body, raw, headers, decision, prompt_tokens, turn, policy_input, decided_at, stored
        )
    finally:
        span.end()


async def _continued(call: Call, route: Route, body: dict[str, Any]) -> StoredResponse | None:
    """The stored response that the request continues, if any. Raises ResponseNotFound and PoolEmpty."""
    previous = body.get("previous_response_id") if route.stores else None
    return await holder(call, previous) if isinstance(previous, str) else None


async def _countable_prompts(
    call: Call, route: Route, raw: bytes, body: dict[str, Any], stored: StoredResponse | None
) -> list[Prompt]:
    """The request's prompts. Empty if they cannot be counted; the engine will probably reject such a request."""
    try:
        prompts = await off_loop(raw, route.prompts, call.runtime.accountant, body)
    except Uncountable as reason:
        log.debug("request %s: its prompt cannot be counted: %s", call.request_id, reason)
        return []
    if stored is None:
        return prompts
    known = stored.session and stored.tokens
    return [prompt.continuing(stored.tokens) for prompt in prompts] if known else []


async def _measure(
    call: Call,
    body: dict[str, Any],
    prompts: list[Prompt],
    salt: CacheSalt | None,
    stored: StoredResponse | None,
) -> tuple[MeasuredTurn | None, int | None]:
    """The turn of a request with one prompt, and the tokens in all its prompts, if they can be counted."""
    if not prompts:
        return None, None
    if len(prompts) > 1:
        return None, await total_tokens(prompts)
    prompt = prompts[0] if salt is None else prompts[0].in_cache(salt.mark)
    scope = call.runtime.scope(call.tenant)
    turn = await call.runtime.turns.measure(scope, prompt, call.request.headers, body, stored)
    return turn, turn.prompt_tokens


async def _salted(
    route: Route, raw: bytes, body: dict[str, Any], salt: CacheSalt | None
) -> tuple[bytes, dict[str, Any], Mapping[str, str]]:
    """The request with the tenant's cache salt: its bytes, its parsed body, and the headers to add.

    The salt is in a header if the request has no field for it. Raises BadRequest.
    """
    if salt is None:
        return raw, body, {}
    if not route.salted:
        return raw, body, {SALT_HEADER: salt.of(None)}
    return *await off_loop(raw, with_salt, raw, body, route.salted, salt), {}


def _decide(call: Call, turn: MeasuredTurn | None, policy_input: PolicyInput | None) -> Decision:
    """Apply the policy. A request that is not a turn goes to the less loaded pool."""
    runtime, metrics = call.runtime, call.runtime.metrics
    if turn is None or policy_input is None:
        metrics.history.labels(History.STATELESS.value).inc()
        return Decision(least_loaded(runtime.pools), Reason.FIXED, stateless=True)
    metrics.delta_tokens.observe(turn.delta_tokens)
    metrics.prompt_tokens.observe(turn.prompt_tokens)
    metrics.history.labels(turn.session.growth.history.value).inc()
    return runtime.policy.decide(policy_input)


def _describe(
    call: Call, span: Span, turn: MeasuredTurn | None, policy_input: PolicyInput | None, decision: Decision
) -> None:
    threshold = call.runtime.config.routing.threshold_tokens
    spans.describe_decision(span, call.span, call.request_id, turn, policy_input, decision, threshold)
    if turn is not None and call.span.is_recording():
        for link in links_to(turn.session.base.span):
            call.span.add_link(link.context, link.attributes)


def _headers(turn: MeasuredTurn | None, prompt_tokens: int | None, decision: Decision) -> dict[str, str]:
    """The response headers about the prompt, its session, and the predictions that the decision is based on."""
    if turn is None:
        headers = {"x-dps-history": History.STATELESS.value}
        if prompt_tokens is not None:
            headers |= {"x-dps-prompt-tokens": str(prompt_tokens), "x-dps-delta-tokens": str(prompt_tokens)}
        return headers
    session = turn.session
    headers = {
        "x-dps-prompt-tokens": str(turn.prompt_tokens),
        "x-dps-delta-tokens": str(turn.delta_tokens),
        "x-dps-turn": str(turn.number),
        "x-dps-session": session.id.text,
        "x-dps-state": session.snapshot.source.value,
        "x-dps-history": session.growth.history.value,
    }
    if decision.predicted:
        headers["x-dps-predicted"] = ",".join(
            f"{pool.value}={decision.predicted[pool]:.3f}" for pool in Pool if pool in decision.predicted
        )
    return headers
