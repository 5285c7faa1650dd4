"""The attributes of the gateway's spans: `dps.*`, and those of OpenTelemetry's GenAI semantic conventions."""

from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.trace import Span, Status, StatusCode

from dps_gateway.api.call import Call
from dps_gateway.engine.usage import PromptSources, Usage
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.telemetry.tracing import links_to

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
"""Request fields, and the span attributes that record their values."""

_SEARCHED: Final = ("dps.request_id", "dps.session", "dps.pool", "dps.reason")
"""The attributes of `dps.route` that are repeated on the SERVER span, so that traces can be searched by them.
The list is short, because recording and exporting an attribute takes about 8 µs."""


def describe_decision(span: Span, call: Call, decision: Decision) -> None:
    """Record the routing decision and its inputs on `dps.route`, and the searchable part on the SERVER span.

    The SERVER span is linked to that of the session's previous turn.
    """
    if not span.is_recording():
        return
    server, turn, policy_input = call.span, call.turn, call.policy_input
    threshold_tokens = call.runtime.config.routing.threshold_tokens
    attributes: dict[str, Any] = {
        "dps.request_id": call.request_id,
        "dps.pool": decision.pool.value,
        "dps.reason": decision.reason.value,
    }
    if threshold_tokens is not None:
        attributes["dps.threshold_tokens"] = threshold_tokens
    if turn is None or policy_input is None:
        attributes["dps.history"] = "stateless"
    else:
        tokens = {pool: view.prompt for pool, view in policy_input.pools.items()}
        attributes |= {
            "dps.prompt_tokens": turn.prompt_tokens,
            "dps.delta_tokens": turn.delta_tokens,
            "dps.turn": turn.number,
            "dps.state": turn.session.snapshot.source.value,
            "dps.history": turn.session.growth.history.value,
            "dps.session": turn.session.id.text,
            **{f"dps.uncached_tokens.{pool.value}": each.uncached for pool, each in tokens.items()},
        }
        if (changed := turn.difference) is not None:
            attributes |= {"dps.changed.message": changed.message, "dps.changed.byte": changed.byte}
            if changed.role is not None:
                attributes["dps.changed.role"] = changed.role
        if turn.point.shared:
            for pool, each in tokens.items():
                attributes[f"dps.fetchable_tokens.{pool.value}"] = each.fetchable
    for pool, seconds in (decision.predicted or {}).items():
        attributes[f"dps.predicted.{pool.value}"] = seconds
    if decision.expected_tokens is not None:
        attributes["dps.expected_tokens_per_verification"] = decision.expected_tokens
    span.set_attributes(attributes)
    server.set_attributes({name: attributes[name] for name in _SEARCHED if name in attributes})
    for link in links_to(turn.session.base.span) if turn is not None else ():
        server.add_link(link.context, link.attributes)


def describe_conversation(server: Span, upstream: Span, client_id: str | None) -> None:
    """Record the conversation id, if the client sent one. The conventions forbid generating one."""
    if client_id is not None:
        server.set_attribute("gen_ai.conversation.id", client_id)
        upstream.set_attribute("gen_ai.conversation.id", client_id)


def describe_request(span: Span, operation: str, provider: str, body: dict[str, Any], model: str) -> None:
    """Record the parameters of the request, but never the prompt."""
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
    """Record the HTTP status of the answer and its replica, which may not be in the pool that the policy chose."""
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


def describe_continuation(span: Span, failed: str, outcome: str) -> None:
    """Record that the replica with the base URL `failed` broke off a stream, and whether another continued it."""
    span.add_event("dps.continuation", {"dps.failed": urlsplit(failed).netloc, "dps.outcome": outcome})


def describe_usage(
    span: Span, usage: Usage, first_chunk_seconds: float | None, sources: PromptSources | None
) -> None:
    """Record the usage that the engine reports and, for a stream, the seconds until its first chunk.

    `sources` is None if the replicas have no prefix cache in common, or if the engine has not reported them.
    """
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
    if usage.verifications:
        span.set_attribute("dps.tokens_per_verification", usage.completion_tokens / usage.verifications)
    if sources is not None:
        span.set_attributes(
            {
                "dps.held_tokens": sources.held,
                "dps.fetched_tokens": sources.fetched,
                "dps.computed_tokens": sources.computed,
            }
        )
    if usage.finish_reason is not None:
        span.set_attribute("gen_ai.response.finish_reasons", [usage.finish_reason])
    if usage.response_id is not None:
        span.set_attribute("gen_ai.response.id", usage.response_id)
    if usage.model is not None:
        span.set_attribute("gen_ai.response.model", usage.model)
