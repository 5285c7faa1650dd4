"""What the handlers of all proxied endpoints share: the request's span, its metric, and errors as responses."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from opentelemetry.trace import Span

from dps_gateway.api.errors import error_response
from dps_gateway.api.request import request_id_of
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.tracing import end_server_span

RUNTIME: Final = web.AppKey("runtime", Runtime)

CLIENT_CLOSED_REQUEST: Final = 499
"""The status in metrics and spans of a request whose client disconnected before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Call:
    """One client request while it is being served."""

    runtime: Runtime
    request: web.Request
    request_id: str
    span: Span
    """The request's SERVER span."""
    started: float
    """`time.perf_counter()` at the request's arrival."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def handler(route: str, metric_label: str, serve: Callable[[Call], Awaitable[web.StreamResponse]]) -> Handler:
    """The aiohttp handler that serves calls of `route`, a path or a pattern for the span's name, with `serve`.

    Every call is traced and counted, and every exception becomes an OpenAI error object.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        runtime = request.app[RUNTIME]
        span = runtime.tracing.server_span(request.method, route, request.headers)
        call = Call(runtime, request, request_id_of(request), span, time.perf_counter())
        status = CLIENT_CLOSED_REQUEST
        failure: Exception | None = None
        try:
            response = await serve(call)
            status = response.status
            return response
        except ConnectionResetError:  # raised by a write to a client that has disconnected
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=status)
        except Exception as error:
            failure = error
            response = error_response(error, call.request_id)
            status = response.status
            return response
        finally:
            runtime.metrics.requests.labels(metric_label, str(status)).inc()
            end_server_span(span, status, failure)

    return handle
