"""Spans: their hierarchy, their attributes, the link to the previous turn, and the absence of prompts."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags

from dps_gateway.api.public import public_app
from dps_gateway.api.spans import REQUEST_ATTRIBUTES
from dps_gateway.config import Telemetry, parse_config
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.tracing import Tracing, links_to
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


async def take_turns(url: str) -> None:
    """Two turns of one conversation."""
    first = [{"role": "user", "content": SECRET}]
    second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    headers = {"x-session-id": "conversation-1", "traceparent": CALLER}
    async with ClientSession() as session:
        for number, messages in enumerate((first, second), 1):
            headers["x-request-id"] = f"request-{number}"
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


@pytest.mark.parametrize("gateway", ["Adaptive"], indirect=True)
async def test_decision_of_a_predicting_policy_records_the_predicted_seconds_of_both_pools(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    await take_turns(gateway)
    for route in by_name(exporter, "dps.route"):
        attributes = dict(route.attributes or {})
        assert attributes["dps.reason"] == "predicted_faster"
        for pool in ("speculative", "greedy"):
            seconds = attributes[f"dps.predicted.{pool}"]
            assert isinstance(seconds, float)
            assert seconds > 0


async def test_server_span_of_a_turn_has_a_span_for_the_decision_and_one_for_the_engine_call(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    await take_turns(gateway)
    _, server = by_name(exporter, "POST /v1/chat/completions")
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


@pytest.mark.parametrize("gateway", ["DeltaPrefill, commonPrefixCache: true"], indirect=True)
async def test_span_of_a_turn_has_the_sources_of_its_prompt_with_a_common_prefix_cache(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello " * 100}], "max_tokens": 1}
    async with ClientSession(raise_for_status=True) as session:
        for _ in range(2):
            async with session.post(f"{gateway}/v1/chat/completions", json=body) as response:
                tokens = (await response.json())["usage"]["prompt_tokens"]
    attributes = [dict(span.attributes or {}) for span in by_name(exporter, "chat m")]
    sources = [
        {name: each[f"dps.{name}_tokens"] for name in ("held", "fetched", "computed")} for each in attributes
    ]
    assert sources == [
        {"held": 0, "fetched": 0, "computed": tokens},
        {"held": tokens - 1, "fetched": 0, "computed": 1},
    ]


async def test_client_error_does_not_mark_the_server_span_as_failed(
    gateway: str, exporter: InMemorySpanExporter
) -> None:
    async with (
        ClientSession() as session,
        session.post(f"{gateway}/v1/chat/completions", data=b"no JSON") as response,
    ):
        assert response.status == 400
    (server,) = by_name(exporter, "POST /v1/chat/completions")
    assert server.status.status_code is StatusCode.UNSET
    assert dict(server.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 400,
        "error.type": "BadRequest",
    }


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


async def test_unsampled_request_has_no_span_and_propagates_the_flag(
    exporter: InMemorySpanExporter,
) -> None:
    tracing = Tracing(Telemetry())
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.record_with(provider)
    server = tracing.server_span("POST", "/v1/chat/completions", {})
    call = tracing.child(server, "chat m", SpanKind.CLIENT)
    flags = tracing.propagate(call, {})["traceparent"].rpartition("-")[2]
    assert int(flags, 16) & TraceFlags.SAMPLED == 0
    call.end()
    server.end()
    assert exporter.get_finished_spans() == ()


async def test_turn_links_to_the_previous_turn(gateway: str, exporter: InMemorySpanExporter) -> None:
    await take_turns(gateway)
    first, second = by_name(exporter, "POST /v1/chat/completions")
    assert first.links == ()
    assert first.context is not None
    assert [link.context.span_id for link in second.links] == [first.context.span_id]


async def test_all_attributes_are_documented(gateway: str, exporter: InMemorySpanExporter) -> None:
    await take_turns(gateway)
    recorded = {name for span in exporter.get_finished_spans() for name in span.attributes or {}}
    page = (Path(__file__).parents[2] / "docs/tracing.md").read_text()
    assert {name for name in recorded | set(REQUEST_ATTRIBUTES.values()) if f"`{name}`" not in page} == set()


async def test_spans_contain_no_prompts(gateway: str, exporter: InMemorySpanExporter) -> None:
    await take_turns(gateway)
    assert SECRET not in "".join(span.to_json() for span in exporter.get_finished_spans())


@pytest.mark.parametrize("reference", ["", "00-1-2", "00-zz-yy-01"])
def test_invalid_stored_span_context_creates_no_link(reference: str) -> None:
    assert links_to(reference) == []


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
