"""Spans: their shape, their attributes, the link to the turn before, and what is never in them."""

import os
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from dps_gateway.app import public_app
from dps_gateway.config import Telemetry, parse_config
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.tracing import Tracing, links_to
from dps_lab.engine.server import create_app
from dps_lab.engine.settings import EngineSettings
from dps_lab.workload.assets import bundled_tokenizer

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "a prompt that nobody may read in a trace"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Everything that is recorded, at once."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return InMemorySpanExporter()


@pytest.fixture
async def gateway(exporter: InMemorySpanExporter) -> AsyncIterator[str]:
    tokenizer = str(bundled_tokenizer())
    engine = TestServer(create_app(EngineSettings(tokenizer, served_model_name="m", speed=100.0)))
    await engine.start_server()
    url = str(engine.make_url("")).rstrip("/")
    pool = f"{{endpoints: ['{url}']}}"
    text = f"model: {{name: m, tokenizer: x}}\npools: {{speculative: {pool}, greedy: {pool}}}"
    config = parse_config(text, source="test", environment={})
    runtime = Runtime(config, Tokenizer.load(tokenizer))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    runtime.tracing.record_with(provider)
    server = TestServer(public_app(runtime), handler_cancellation=True)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()
    await runtime.close()
    await engine.close()


async def take_turns(url: str) -> None:
    """Two turns of one conversation."""
    first = [{"role": "user", "content": SECRET}]
    second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    headers = {"x-session-id": "conversation-1", "traceparent": CALLER}
    async with ClientSession() as session:
        for messages in (first, second):
            body = {"model": "m", "messages": messages, "max_tokens": 5, "temperature": 0.5}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()


def by_name(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def test_a_turn_is_a_server_span_with_its_decision_and_its_call(
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
    decided = dict(route.attributes or {})
    assert (
        decided.items()
        >= {
            "dps.pool": "speculative",
            "dps.reason": "within_threshold",
            "dps.history": "grown",
            "dps.state": "mirror",
            "dps.turn": 2,
            "dps.threshold_tokens": 128,
        }.items()
    )
    assert decided["dps.prompt_tokens"] == dict(call.attributes or {})["gen_ai.usage.input_tokens"]
    assert 0 < int(str(decided["dps.delta_tokens"])) < int(str(decided["dps.prompt_tokens"]))
    assert (
        dict(call.attributes or {}).items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "sglang",
            "gen_ai.request.model": "m",
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.conversation.id": "conversation-1",
        }.items()
    )


async def test_a_turn_links_to_the_turn_before(gateway: str, exporter: InMemorySpanExporter) -> None:
    await take_turns(gateway)
    first, second = by_name(exporter, "POST /v1/chat/completions")
    assert first.links == ()
    assert first.context is not None
    assert [link.context.span_id for link in second.links] == [first.context.span_id]


async def test_prompts_are_in_no_span(gateway: str, exporter: InMemorySpanExporter) -> None:
    await take_turns(gateway)
    assert SECRET not in "".join(span.to_json() for span in exporter.get_finished_spans())


@pytest.mark.parametrize("reference", ["", "00-1-2", "00-zz-yy-01"])
def test_a_reference_that_is_none_makes_no_link(reference: str) -> None:
    assert links_to(reference) == []


def test_without_an_endpoint_nothing_is_recorded_and_the_callers_context_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = Tracing(Telemetry())
    span = tracing.server_span("POST", "/v1/chat/completions", {})
    assert not span.is_recording()
    assert tracing.propagate(span, {"traceparent": CALLER}) == {"traceparent": CALLER}


async def test_what_is_passed_through_is_a_server_span_of_the_callers_trace(
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
