"""`python -m dps_lab.bench.otlp_receiver PORT FILE`: receives spans by OTLP/gRPC and discards them.

It is a tracing backend with minimal cost. It writes the number of received spans to FILE.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc  # type: ignore[import-untyped]  # has no stubs
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts received spans."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._spans = 0

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:  # noqa: N802  # gRPC's name
        self._spans += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
        self._file.write_text(str(self._spans))
        return ExportTraceServiceResponse()


def main() -> None:
    """Serve until the process is terminated."""
    parser = argparse.ArgumentParser(description="An OTLP/gRPC receiver for the benchmark.")
    parser.add_argument("port", type=int, metavar="PORT")
    parser.add_argument("file", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    server = grpc.server(ThreadPoolExecutor(1))
    receiver = Receiver(arguments.file)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
