"""Export of spans: over both OTLP protocols, from the configuration file or from OTEL_* variables."""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import grpc  # type: ignore[import-untyped]  # has no stubs
import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from dps_gateway.config import Telemetry
from dps_gateway.telemetry.tracing import Tracing
from tests.gateway.servers import serving

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
SAMPLED = f"{UNSAMPLED[:-1]}1"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives spans over gRPC and HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:  # noqa: N802  # gRPC's name
        self.requests.append(request)
        return ExportTraceServiceResponse()

    async def post(self, request: web.Request) -> web.Response:
        self.requests.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(body=b"")

    def spans(self) -> list[tuple[str, str]]:
        """(service, span name) of all spans received."""
        return [
            (attribute.value.string_value, span.name)
            for request in self.requests
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def grpc_server(collector: trace_service_pb2_grpc.TraceServiceServicer) -> tuple[grpc.Server, int]:
    """A started server, and its port."""
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


@pytest.fixture(autouse=True)
def no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
async def http_endpoint(collector: Collector) -> AsyncIterator[str]:
    async with serving(collector.post, "/v1/traces") as url:
        yield url


@pytest.fixture
async def grpc_endpoint(collector: Collector) -> AsyncIterator[str]:
    server, port = grpc_server(collector)
    yield f"http://127.0.0.1:{port}"
    await asyncio.to_thread(server.stop(grace=None).wait)


async def export_one_span(**settings: object) -> None:
    tracing = Tracing(Telemetry.model_validate(settings))
    tracing.server_span("POST", "/v1/chat/completions", {}).end()
    await asyncio.to_thread(tracing.shutdown)


async def test_grpc_exporter_is_configured_by_the_file(collector: Collector, grpc_endpoint: str) -> None:
    await export_one_span(otlpEndpoint=grpc_endpoint, serviceName="mine")
    assert collector.spans() == [("mine", "POST /v1/chat/completions")]


async def test_environment_overrides_the_file(
    collector: Collector, http_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", http_endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
    await export_one_span(otlpEndpoint="http://127.0.0.1:1", sampleRatio=0.0)
    assert collector.spans() == [("theirs", "POST /v1/chat/completions")]


@pytest.mark.parametrize(
    ("drawn", "incoming", "recorded", "upstream_samples"),
    [
        pytest.param(0.24, {}, True, True, id="new trace, sampled"),
        pytest.param(0.25, {}, False, False, id="new trace, not sampled"),
        pytest.param(0.25, {"traceparent": SAMPLED}, True, True, id="sampled by the caller"),
        pytest.param(0.24, {"traceparent": UNSAMPLED}, False, False, id="not sampled by the caller"),
        pytest.param(0.25, {"traceparent": "00-1-2-01"}, False, False, id="invalid context of the caller"),
    ],
)
async def test_sample_ratio_applies_to_new_traces(
    collector: Collector,
    http_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    drawn: float,
    incoming: dict[str, str],
    recorded: bool,
    upstream_samples: bool,
) -> None:
    monkeypatch.setattr("dps_gateway.telemetry.tracing.random", lambda: drawn)
    settings = {"otlpEndpoint": http_endpoint, "protocol": "http/protobuf", "sampleRatio": 0.25}
    tracing = Tracing(Telemetry.model_validate(settings))
    span = tracing.server_span("POST", "/v1/chat/completions", incoming)
    sent = tracing.propagate(span, incoming)
    span.end()
    await asyncio.to_thread(tracing.shutdown)
    assert len(collector.spans()) == recorded
    upstream = trace.get_current_span(extract(sent)).get_span_context()
    assert (upstream.is_valid, upstream.trace_flags.sampled) == (True, upstream_samples)


async def test_unsampled_trace_propagates_only_the_callers_baggage(http_endpoint: str) -> None:
    incoming = {"traceparent": "00-1-2-01", "tracestate": "vendor=of-no-trace", "baggage": "tenant=a"}
    settings = {"otlpEndpoint": http_endpoint, "protocol": "http/protobuf", "sampleRatio": 0.0}
    tracing = Tracing(Telemetry.model_validate(settings))
    sent = tracing.propagate(tracing.server_span("POST", "/v1/chat/completions", incoming), incoming)
    assert sent == {"traceparent": sent["traceparent"], "baggage": "tenant=a"}
    assert sent["traceparent"] != incoming["traceparent"]
    await asyncio.to_thread(tracing.shutdown)


class SilentCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives spans and does not answer until `answer` is set."""

    def __init__(self) -> None:
        self.call: grpc.ServicerContext | None = None
        self.answer = Event()

    def Export(  # noqa: N802  # gRPC's name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.call = context
        self.answer.wait(60)
        return ExportTraceServiceResponse()


async def test_unresponsive_backend_does_not_delay_shutdown() -> None:
    backend = SilentCollector()
    server, port = grpc_server(backend)
    await export_one_span(otlpEndpoint=f"http://127.0.0.1:{port}")
    assert backend.call is not None
    assert backend.call.is_active(), "the exporter gave up before the flush timed out"
    backend.answer.set()
    await asyncio.to_thread(server.stop(grace=5).wait)
