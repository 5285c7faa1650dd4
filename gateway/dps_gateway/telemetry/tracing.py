"""OpenTelemetry tracing: a SERVER span per request, and under it `dps.route` and the upstream call's CLIENT span.

`OTEL_*` variables are honoured and override the configuration file.
"""

import logging
import os
from collections.abc import Mapping
from random import getrandbits, random
from threading import Thread
from typing import Final

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
OTLP_HTTP_TRACES_PATH: Final = "/v1/traces"
"""The path that OTLP over HTTP appends to a collector's base URL (OTLP specification, "OTLP/HTTP Request")."""

_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACE_HEADERS: Final = ("traceparent", "tracestate", "baggage")


class Tracing:
    """The tracer of this process. Without an OTLP endpoint, spans are no-ops."""

    def __init__(self, settings: Telemetry) -> None:
        self._provider: TracerProvider | None = None
        self._tracer: Tracer = trace.NoOpTracer()
        self._ratio = 1.0 if "OTEL_TRACES_SAMPLER" in os.environ else settings.sample_ratio
        provider = _provider(settings)
        if provider is not None:
            self.record_with(provider)

    def record_with(self, provider: TracerProvider) -> None:
        """Use the tracer provider `provider` for all subsequent spans."""
        self._provider = provider
        self._tracer = provider.get_tracer(INSTRUMENTATION)

    def server_span(self, method: str, route: str, headers: Mapping[str, str]) -> Span:
        """Start the span of a request, a child of the caller's span; INVALID_SPAN if the request is not sampled."""
        if self._provider is None:
            return trace.INVALID_SPAN
        caller = extract(headers)
        # Sampling here costs less than in the SDK, whose sampler runs after much of the span has been built.
        if random() >= self._ratio and not trace.get_current_span(caller).get_span_context().is_valid:
            return trace.INVALID_SPAN
        attributes = {"http.request.method": method, "http.route": route}
        return self._tracer.start_span(f"{method} {route}", caller, SpanKind.SERVER, attributes)

    def child(self, parent: Span, name: str, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """Start a span under `parent`. Returns `parent` if it is not recorded: a child would not be recorded either."""
        if not parent.is_recording():
            return parent
        return self._tracer.start_span(name, trace.set_span_in_context(parent), kind)

    def propagate(self, span: Span, incoming: Mapping[str, str]) -> dict[str, str]:
        """The trace headers of the upstream request.

        Without a tracer they are the caller's. For a request that is not sampled they carry a fresh trace id with
        the sampled flag cleared, because SGLang would otherwise start a trace.
        """
        if self._provider is None:
            return {name: incoming[name] for name in _TRACE_HEADERS if name in incoming}
        if span is trace.INVALID_SPAN:
            headers = {"traceparent": f"00-{getrandbits(128):032x}-{getrandbits(64):016x}-00"}
            if "baggage" in incoming:
                headers["baggage"] = incoming["baggage"]
            return headers
        carrier: dict[str, str] = {}
        inject(carrier, trace.set_span_in_context(span, extract(incoming)))
        return carrier

    def shutdown(self) -> None:
        """Flush buffered spans for up to FLUSH_SECONDS. An unreachable backend must not delay shutdown."""
        if self._provider is not None:
            # The shutdown runs in a thread, because the exporter retries for 10 s.
            flush = Thread(target=self._provider.shutdown, daemon=True)
            flush.start()
            flush.join(FLUSH_SECONDS)


def end_server_span(span: Span, status: int, error: BaseException | None = None) -> None:
    """End a request's span with the HTTP status of its response and the exception that caused it, if any.

    By OpenTelemetry's HTTP conventions a 4xx status does not make a SERVER span an error.
    """
    if span.is_recording():
        span.set_attribute("http.response.status_code", status)
        if error is not None:
            span.set_attribute("error.type", _type(error))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
    span.end()


def fail_span(span: Span, error: BaseException) -> None:
    """Mark an open span as failed with `error`."""
    span.set_attribute("error.type", _type(error))
    span.set_status(Status(StatusCode.ERROR))


def _type(error: BaseException) -> str:
    """The name of the error's class, unless the error states another name."""
    return str(getattr(error, "error_type", type(error).__name__))


def span_reference(span: Span) -> str:
    """The span as a W3C traceparent for the session's record; empty if the span is not recorded."""
    if not span.is_recording():
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def links_to(reference: str) -> list[Link]:
    """A link to the span that `span_reference` encoded; none if `reference` is not valid."""
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
    endpoint_set = any(environment.get(name) for name in _ENDPOINT_VARIABLES)
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if not endpoint_set and settings.otlp_endpoint is None:
        return None
    name = environment.get("OTEL_SERVICE_NAME", settings.service_name)
    resource = Resource.create({SERVICE_NAME: name})
    # No sampler is set: head sampling has already been applied in `server_span`, and the SDK's default follows the
    # caller's decision.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # While a backend is unreachable, a warning per dropped span costs more than the span; the exporter also warns.
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.ERROR)
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings, endpoint_set)))
    return provider


def _exporter(settings: Telemetry, endpoint_set: bool) -> SpanExporter:
    """The exporter for the configured protocol. Its library reads the environment if no endpoint is passed."""
    endpoint = None if endpoint_set else settings.otlp_endpoint
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or settings.protocol
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        insecure = True if endpoint is not None and endpoint.startswith("http://") else None
        return GrpcExporter(endpoint=endpoint, insecure=insecure)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint and endpoint.rstrip("/") + OTLP_HTTP_TRACES_PATH)
