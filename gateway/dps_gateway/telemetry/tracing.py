"""OpenTelemetry: one SERVER span a request, `dps.route` under it, and the CLIENT span of the upstream call.

Every OTEL_* variable works; the configuration file fills in what they leave open.
"""

import logging
import os
from collections.abc import Mapping
from random import getrandbits, random
from threading import Thread
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
)

from dps_gateway.config import Telemetry

INSTRUMENTATION: Final = "dps_gateway"
FLUSH_SECONDS: Final = 3.0

_TRACE_HEADERS: Final = ("traceparent", "tracestate", "baggage")


class Tracing:
    """The tracer of this process. Without an endpoint no span is recorded and none is paid for."""

    def __init__(self, settings: Telemetry) -> None:
        self._provider: TracerProvider | None = None
        self._tracer: Tracer = trace.NoOpTracer()
        self._ratio = 1.0 if "OTEL_TRACES_SAMPLER" in os.environ else settings.sample_ratio
        provider = _provider(settings)
        if provider is not None:
            self.record_with(provider)

    def record_with(self, provider: TracerProvider) -> None:
        """Record spans, and let `provider` have them."""
        self._provider = provider
        self._tracer = provider.get_tracer(INSTRUMENTATION)

    def server_span(self, method: str, route: str, headers: Mapping[str, str]) -> Span:
        """The span of a request, child of the caller's; INVALID_SPAN where nothing of it is recorded."""
        if self._provider is None:
            return trace.INVALID_SPAN
        caller = extract(headers)
        # The SDK's sampler decides when spans are half made already: a fifteenth of a whole request's CPU.
        if random() >= self._ratio and not trace.get_current_span(caller).get_span_context().is_valid:
            return trace.INVALID_SPAN
        attributes = {"http.request.method": method, "http.route": route}
        return self._tracer.start_span(f"{method} {route}", caller, SpanKind.SERVER, attributes)

    def child(self, parent: Span, name: str, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """A span under `parent`; `parent` itself where it is not recorded, as its child would not be either."""
        if not parent.is_recording():
            return parent
        return self._tracer.start_span(name, trace.set_span_in_context(parent), kind)

    def propagate(self, span: Span, incoming: Mapping[str, str]) -> dict[str, str]:
        """The W3C headers for the upstream request: ours, or the caller's where we record nothing."""
        if self._provider is None:
            return {name: incoming[name] for name in _TRACE_HEADERS if name in incoming}
        if (
            span is trace.INVALID_SPAN
        ):  # left out: SGLang has to be told, by W3C's header, or it begins a trace
            told = {"traceparent": f"00-{getrandbits(128):032x}-{getrandbits(64):016x}-00"}
            if "baggage" in incoming:
                told["baggage"] = incoming["baggage"]
            return told
        carrier: dict[str, str] = {}
        inject(carrier, trace.set_span_in_context(span, extract(incoming)))
        return carrier

    def shutdown(self) -> None:
        """Flush what is buffered, for as long as FLUSH_SECONDS: a backend that is away keeps nobody running."""
        if self._provider is not None:
            # The exporter itself goes on trying for 10 s.
            flush = Thread(target=self._provider.shutdown, daemon=True)
            flush.start()
            flush.join(FLUSH_SECONDS)


def end_server_span(span: Span, status: int, error: BaseException | None = None) -> None:
    """End a request's span with the HTTP status it was answered with, and what was raised, if anything.

    By OpenTelemetry's HTTP conventions a client's mistake (4xx) is no error of the server's span.
    """
    if span.is_recording():
        span.set_attribute("http.response.status_code", status)
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
    span.end()


def fail_span(span: Span, error: BaseException) -> None:
    """Say on a span that is still open what it failed by."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR))


def span_reference(span: Span) -> str:
    """The span as a W3C traceparent, to be kept in the session's record; empty if nobody will see it."""
    if not span.is_recording():
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def links_to(reference: str) -> list[Link]:
    """A link to the span that `span_reference` wrote down."""
    parts = reference.split("-")
    if len(parts) != 4:
        return []
    try:
        context = SpanContext(int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16)))
    except ValueError:
        return []
    return [Link(NonRecordingSpan(context).get_span_context(), {"dps.link": "previous_turn"})]


def _provider(settings: Telemetry) -> TracerProvider | None:
    environment = os.environ
    endpoint_set = any(
        environment.get(name)
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if not endpoint_set and settings.otlp_endpoint is None:
        return None
    name = environment.get("OTEL_SERVICE_NAME", settings.service_name)
    resource = Resource.create({SERVICE_NAME: name})
    # No sampler of ours: the SDK's goes by the caller, and what begins here has been left out by chance already.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # While a backend is away a warning for each span that is dropped costs more than the span; the exporter warns too.
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.ERROR)
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings, endpoint_set)))
    return provider


def _exporter(settings: Telemetry, endpoint_set: bool) -> SpanExporter:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", settings.protocol
    )
    options: dict[str, Any] = {} if endpoint_set else {"endpoint": settings.otlp_endpoint}
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        if not endpoint_set and str(settings.otlp_endpoint).startswith("http://"):
            options["insecure"] = True
        return GrpcExporter(**options)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    if not endpoint_set:
        options["endpoint"] = f"{str(settings.otlp_endpoint).rstrip('/')}/v1/traces"
    return HttpExporter(**options)
