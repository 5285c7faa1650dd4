"""The rest of the engines' API: relayed as it is, without a session, to whoever has least to do."""

import time
from typing import Final

from aiohttp import web

from dps_gateway.api.dispatch import least_loaded, place
from dps_gateway.api.errors import error_event, refusal
from dps_gateway.api.request import RUNTIME, read_body, request_id_of
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.session.record import History
from dps_gateway.telemetry.tracing import end_server_span
from dps_gateway.upstream.exchange import UpstreamBroken, forwarded_headers

ROUTE: Final = "/v1/*"


async def passed_through(request: web.Request) -> web.StreamResponse:
    """Any other route of the engines: /v1/models, /v1/embeddings, /v1/responses, /v1/messages and so on."""
    runtime = request.app[RUNTIME]
    request_id = request_id_of(request)
    started = time.perf_counter()
    span = runtime.tracing.server_span(request.method, ROUTE, request.headers)
    status = 499
    failure: Exception | None = None
    try:
        runtime.tenant(request.headers)
        body = await read_body(request) if request.can_read_body else None
        trace = runtime.tracing.propagate(span, request.headers)
        placed = await place(
            runtime,
            Decision(least_loaded(runtime), Reason.FIXED),
            None,
            request.raw_path,
            body,
            lambda api_key: forwarded_headers(request.headers, api_key, trace, request_id),
            started,
            whole=False,
            method=request.method,
        )
        try:
            response = web.StreamResponse(status=placed.answer.status, headers=placed.answer.headers())
            response.headers.update(
                {
                    "x-request-id": request_id,
                    "x-dps-pool": placed.pool.name.value,
                    "x-dps-reason": placed.reason.value,
                    "x-dps-history": History.STATELESS.value,
                }
            )
            await response.prepare(request)
            await response.write(placed.answer.first)
            try:
                async for chunk in placed.answer.rest():
                    await response.write(chunk)
            except UpstreamBroken as error:
                if not placed.answer.streams:
                    raise ConnectionResetError(str(error)) from error  # cut: a short body must not look whole
                await response.write(error_event(error))
            await response.write_eof()
        finally:
            placed.close()
        status = response.status
        return response
    except ConnectionResetError:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=status)
    except Exception as error:
        failure = error
        refused = refusal(error, request_id)
        status = refused.status
        return refused
    finally:
        runtime.metrics.requests.labels("relayed", str(status)).inc()
        end_server_span(span, status, failure)
