"""An OTLP/gRPC receiver that forwards spans to a backend and records them, because the backend drops span links."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc  # type: ignore[import-untyped]  # has no stubs
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SECONDS = 60.0


class Relay(trace_service_pb2_grpc.TraceServiceServicer):
    """Relays spans from a gateway to a backend and records span links, which Phoenix does not store."""

    def __init__(self, backend: trace_service_pb2_grpc.TraceServiceStub) -> None:
        self._backend = backend
        self._spans: list[Span] = []
        self.url = ""

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:  # noqa: N802  # gRPC's name
        self._spans += [
            span
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        answer: ExportTraceServiceResponse = self._backend.Export(request, timeout=SECONDS)
        return answer

    def links(self) -> dict[str, list[str]]:
        """The ids of linked spans, by span id; spans without links are omitted."""
        return {
            span.span_id.hex(): [link.span_id.hex() for link in span.links]
            for span in list(self._spans)
            if span.links
        }


@contextmanager
def relay_to(url: str) -> Iterator[Relay]:
    """Run a relay on a free port of loopback, to an OTLP/gRPC receiver."""
    with grpc.insecure_channel(url.removeprefix("http://")) as channel:
        relay = Relay(trace_service_pb2_grpc.TraceServiceStub(channel))  # type: ignore[no-untyped-call]
        server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(relay, server)  # type: ignore[no-untyped-call]
        relay.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield relay
        finally:
            server.stop(grace=None).wait(SECONDS)
