"""The attributes of the gateway's spans: the contract's `dps.*`, and OpenTelemetry's GenAI conventions."""

from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.trace import Span, Status, StatusCode

from dps_gateway.engine.dialect import Usage
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.turn import MeasuredTurn

REQUEST_ATTRIBUTES: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
}
"""A request's field -> the attribute that repeats it."""

_SEARCHED: Final = ("dps.request_id", "dps.session", "dps.pool", "dps.reason")
"""An attribute costs some 8 µs until it is sent, so not all that `dps.route` says is said twice."""


def describe_decision(
    span: Span,
    server: Span,
    request_id: str,
    turn: MeasuredTurn | None,
    decision: Decision,
    threshold_tokens: int | None,
) -> None:
    """What `dps.route` decided, and by what; the request's own span says what requests are looked for by."""
    if not span.is_recording():
        return
    attributes: dict[str, Any] = {
        "dps.request_id": request_id,
        "dps.pool": decision.pool.value,
        "dps.reason": decision.reason.value,
    }
    if threshold_tokens is not None:
        attributes["dps.threshold_tokens"] = threshold_tokens
    if turn is None:
        attributes["dps.history"] = "stateless"
    else:
        growth = turn.session.growth
        attributes |= {
            "dps.prompt_tokens": turn.prompt_tokens,
            "dps.delta_tokens": turn.delta_tokens,
            "dps.turn": turn.number,
            "dps.state": turn.session.snapshot.source.value,
            "dps.history": growth.history.value,
            "dps.session": turn.session.id.text,
            **{
                f"dps.uncached_tokens.{pool.value}": growth.uncached_tokens(turn.prompt_tokens, pool)
                for pool in Pool
            },
        }
    span.set_attributes(attributes)
    server.set_attributes({name: attributes[name] for name in _SEARCHED if name in attributes})


def describe_conversation(server: Span, upstream: Span, client_id: str | None) -> None:
    """The conversation's id, if the client gave one; the conventions forbid inventing one."""
    if client_id is not None:
        server.set_attribute("gen_ai.conversation.id", client_id)
        upstream.set_attribute("gen_ai.conversation.id", client_id)


def describe_request(span: Span, operation: str, provider: str, body: dict[str, Any], model: str) -> None:
    """What was asked for. Never the prompt."""
    if not span.is_recording():
        return
    span.set_attributes(
        {"gen_ai.operation.name": operation, "gen_ai.provider.name": provider, "gen_ai.request.model": model}
    )
    for name, attribute in REQUEST_ATTRIBUTES.items():
        value = body.get(name)
        if isinstance(value, bool | int | float):
            span.set_attribute(attribute, value)


def describe_placement(span: Span, url: str, pool: Pool, reason: Reason, status: int) -> None:
    """Who answers, which is not always whom the policy chose, and by which HTTP status."""
    if not span.is_recording():
        return
    parts = urlsplit(url)
    span.set_attributes(
        {
            "server.address": parts.hostname or "",
            "dps.pool": pool.value,
            "dps.reason": reason.value,
            "http.response.status_code": status,
        }
    )
    if parts.port is not None:
        span.set_attribute("server.port", parts.port)
    if status >= 400:
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))


def describe_usage(span: Span, usage: Usage, first_chunk_seconds: float | None) -> None:
    """What the engine says it used; and of a stream, seconds until its first chunk."""
    if not span.is_recording():
        return
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }
    )
    if first_chunk_seconds is not None:
        span.set_attribute("gen_ai.response.time_to_first_chunk", first_chunk_seconds)
    if usage.cached_tokens is not None:
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
    if usage.finish_reason is not None:
        span.set_attribute("gen_ai.response.finish_reasons", [usage.finish_reason])
    if usage.response_id is not None:
        span.set_attribute("gen_ai.response.id", usage.response_id)
    if usage.model is not None:
        span.set_attribute("gen_ai.response.model", usage.model)
