"""Spans: their hierarchy, their attributes, the link to the previous turn, and the absence of prompts."""

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dps_gateway.api.public import public_app
from dps_gateway.config import Telemetry, parse_config
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.tracing import Tracing
from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.server import create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_testkit.tokenizers import shared_tokenizer

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "a prompt that nobody may read in a trace"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects every span as soon as it ends."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return InMemorySpanExporter()


@pytest.fixture
async def gateway(exporter: InMemorySpanExporter, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A gateway with one engine. The parameter is its policy, which other settings of routing may follow."""
    tokenizer = str(bundled_tokenizer())
    engine = TestServer(create_app(EngineSettings(tokenizer, served_model_name="m", speed=100.0)))
    await engine.start_server()
    url = str(engine.make_url("")).rstrip("/")
    pool = f"{{endpoints: ['{url}']}}"
    text = f"model: {{name: m, tokenizer: x}}\npools: {{speculative: {pool}, greedy: {pool}}}\n"
    text += f"routing: {{policy: {getattr(request, 'param', 'DeltaPrefill')}}}"
    config = parse_config(text, source="test", environment={})
    runtime = Runtime(config, shared_tokenizer(tokenizer))
    record(runtime, exporter)
    server = TestServer(public_app(runtime), handler_cancellation=True)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()
    await runtime.close()
    await engine.close()


def record(runtime: Runtime, exporter: InMemorySpanExporter) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    runtime.tracing.record_with(provider)


async def take_turns(url: str, system: Sequence[str] = ()) -> None:
    """Two turns of one conversation, with these system prompts."""
    first, front = [{"role": "user", "content": SECRET}], [{"role": "system", "content": s} for s in system]
    second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    headers = {"x-session-id": "conversation-1", "traceparent": CALLER}
    async with ClientSession() as session:
        for number, messages in enumerate((first, second), 1):
            headers["x-request-id"] = f"request-{number}"
            messages = [*front[number - 1 : number], *messages]
            body = {"model": "m", "messages": messages, "max_tokens": 5, "temperature": 0.5}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()


def by_name(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def present(span: ReadableSpan, attribute: str) -> object:
    """The value of an attribute that differs between runs; it must not be empty."""
    value = dict(span.attributes or {}).get(attribute)
    assert value
    return value


async def test_span_of_a_changed_history_says_where_the_prompt_differs(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    await take_turns(gateway, ("It is Monday.", "It is Tuesday."))
    first, second = (dict(route.attributes or {}) for route in by_name(exporter, "dps.route"))
    changed = {name: value for name, value in second.items() if name.startswith("dps.changed.")}
    assert changed == {"dps.changed.message": 0, "dps.changed.role": "system", "dps.changed.byte": 0}
    assert not any(name.startswith("dps.changed.") for name in first)


async def test_spans_of_a_turn_are_complete_and_link_to_the_previous_turn_without_prompts(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    await take_turns(gateway)
    first, server = by_name(exporter, "POST /v1/chat/completions")
    assert first.context is not None
    assert (first.links, [link.context.span_id for link in server.links]) == ((), [first.context.span_id])
    _, route = by_name(exporter, "dps.route")
    _, call = by_name(exporter, "chat m")
    assert (server.kind, route.kind, call.kind) == (SpanKind.SERVER, SpanKind.INTERNAL, SpanKind.CLIENT)
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" in CALLER
    assert server.context is not None
    assert [span.parent and span.parent.span_id for span in (route, call)] == [server.context.span_id] * 2
    decision = {
        "dps.request_id": "request-2",
        "dps.pool": "speculative",
        "dps.reason": "within_threshold",
        "dps.threshold_tokens": 128,
        "dps.prompt_tokens": 46,
        "dps.delta_tokens": 14,
        "dps.turn": 2,
        "dps.state": "mirror",
        "dps.history": "grown",
        "dps.session": present(route, "dps.session"),
        "dps.uncached_tokens.speculative": 14,
        "dps.uncached_tokens.greedy": 14,  # both pools have the same engine
    }
    assert dict(route.attributes or {}) == decision
    searched = ("dps.request_id", "dps.session", "dps.pool", "dps.reason")
    assert dict(server.attributes or {}) == {name: decision[name] for name in searched} | {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.conversation.id": "conversation-1",
    }
    assert dict(call.attributes or {}) == {
        "dps.pool": "speculative",
        "dps.reason": "within_threshold",
        "gen_ai.conversation.id": "conversation-1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sglang",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.id": present(call, "gen_ai.response.id"),
        "gen_ai.response.model": "m",
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.usage.input_tokens": 46,
        "gen_ai.usage.output_tokens": 5,
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": present(call, "server.port"),
    }
    assert SECRET not in "".join(span.to_json() for span in exporter.get_finished_spans())


@pytest.mark.parametrize("gateway", ["Adaptive, commonPrefixCache: true"], indirect=True)
async def test_spans_have_the_predicted_seconds_of_both_pools_and_the_sources_of_the_prompt(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    await take_turns(gateway)
    for route in by_name(exporter, "dps.route"):
        assert present(route, "dps.reason") == "predicted_faster"
        for pool in ("speculative", "greedy"):
            assert isinstance(present(route, f"dps.predicted.{pool}"), float)
    for call in by_name(exporter, "chat m"):
        attributes = dict(call.attributes or {})
        sources: list[Any] = [attributes[f"dps.{name}_tokens"] for name in ("held", "fetched", "computed")]
        assert sum(sources) == attributes["gen_ai.usage.input_tokens"]


async def test_engine_error_marks_only_the_client_span_as_failed(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": -1}
    async with (
        ClientSession() as session,
        session.post(f"{gateway}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 400, await response.text()
    (server,), (call,) = by_name(exporter, "POST /v1/chat/completions"), by_name(exporter, "chat m")
    assert (server.status.status_code, call.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert dict(call.attributes or {})["error.type"] == "400"


async def test_unreachable_engine_marks_server_and_client_span_as_failed(
    exporter: InMemorySpanExporter,
) -> None:
    nowhere = "{endpoints: ['http://127.0.0.1:9']}"
    text = f"model: {{name: m, tokenizer: x}}\npools: {{speculative: {nowhere}, greedy: {nowhere}}}"
    runtime = Runtime(parse_config(text, source="test", environment={}), shared_tokenizer())
    record(runtime, exporter)
    async with TestServer(public_app(runtime)) as server, ClientSession() as session:
        url = server.make_url("/v1/chat/completions")
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        async with session.post(url, json=body) as response:
            status = response.status
    await runtime.close()
    assert status in (502, 503)
    recorded = {
        span.name: (span.status.status_code, dict(span.attributes or {}).get("http.response.status_code"))
        for span in exporter.get_finished_spans()
    }
    assert recorded == {
        "dps.route": (StatusCode.UNSET, None),
        "chat m": (StatusCode.ERROR, None),
        "POST /v1/chat/completions": (StatusCode.ERROR, status),
    }


def test_without_an_endpoint_the_callers_context_is_propagated_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = Tracing(Telemetry())
    span = tracing.server_span("POST", "/v1/chat/completions", {})
    assert not span.is_recording()
    assert tracing.propagate(span, {"traceparent": CALLER}) == {"traceparent": CALLER}


async def test_forwarded_request_has_server_span_in_the_callers_trace(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    async with (
        ClientSession(headers={"traceparent": CALLER}) as session,
        session.get(f"{gateway}/v1/models") as response,
    ):
        assert response.status == 200
    (server,) = by_name(exporter, "GET /v1/*")
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" in CALLER
    assert dict(server.attributes or {})["http.response.status_code"] == 200
