"""The application on the public port: its routes, how calls begin and end, errors as JSON, cross-origin requests."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import orjson
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from dps_gateway import installed_version
from dps_gateway.api.call import RUNTIME, Call, request_id_of, timeout_seconds_of
from dps_gateway.api.decisions import record_decision
from dps_gateway.api.endpoints import ENDPOINTS, errors_of
from dps_gateway.api.errors import Problem, Refused, error_response
from dps_gateway.api.inference import serve
from dps_gateway.api.openapi import encoded
from dps_gateway.api.outcome import Outcome
from dps_gateway.api.passthrough import RELAYED_GET, RELAYED_POST, forward
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.tracing import end_server_span

log = logging.getLogger(__name__)

PREFLIGHT_MAX_AGE_SECONDS: Final = 3600


def public_app(runtime: Runtime) -> web.Application:
    """The application of the public port."""
    # The handlers themselves limit the body, so that a reload of the configuration can change the limit.
    app = web.Application(client_max_size=0, middlewares=[_json_errors])
    app[RUNTIME] = runtime
    app.on_response_prepare.append(_add_headers)
    own = {"/health": _health, "/version": _version, "/openapi.json": _openapi}
    for path, handler in own.items():
        app.router.add_get(path, handler, expect_handler=_expect)
    for endpoint in ENDPOINTS:
        routed = _handler(endpoint.path, endpoint.path, partial(serve, endpoint=endpoint), record_decision)
        app.router.add_post(endpoint.path, routed, expect_handler=_expect)
    relayed = _handler("/v1/*", "relayed", forward)
    for path in RELAYED_GET:
        app.router.add_get(path, relayed, expect_handler=_expect)
    for path in RELAYED_POST:
        app.router.add_post(path, relayed, expect_handler=_expect)
    app.router.add_route("*", "/v1/{rest:.*}", relayed, expect_handler=_expect)
    return app


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Ask the client for the body of the request. aiohttp's refusal of another expectation quotes it."""
    if request.headers[hdrs.EXPECT].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None
    error = Refused(Problem.EXPECTATION_FAILED, "the gateway supports only 'Expect: 100-continue'")
    return error_response(error, request_id_of(request), errors_of(request.path))


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer preflight requests, and return error objects for large headers, and unknown paths and methods."""
    if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
        # Browsers send preflight requests without credentials.
        permission = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: request.headers[hdrs.ACCESS_CONTROL_REQUEST_METHOD],
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_MAX_AGE_SECONDS),
        }
        return web.Response(status=204, headers=permission)
    headers: dict[str, str] = {}
    limit = request.app[RUNTIME].config.listen.max_header_bytes
    try:
        for name, value in request.raw_headers:
            # The limit of the parser is higher, because its own answer does not name the limit.
            if len(value) > limit:
                raise Refused(
                    Problem.HEADER_TOO_LARGE,
                    f"the header {name.decode(errors='replace')} has {len(value)} bytes, more than the {limit} of "
                    "listen.maxHeaderBytes",
                )
        return await handler(request)
    except Refused as refusal:
        error = refusal
    except web.HTTPNotFound:
        error = Refused(Problem.NOT_FOUND, f"there is no endpoint {request.rel_url.raw_path}")
    except web.HTTPMethodNotAllowed as wrong:
        error = Refused(
            Problem.METHOD_NOT_ALLOWED, f"{request.rel_url.raw_path} does not support {request.method}"
        )
        headers["Allow"] = ", ".join(sorted(wrong.allowed_methods))
    return error_response(error, request_id_of(request), errors_of(request.path), headers)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Let scripts of any origin read the response, and close the connection after it while the gateway drains.

    Access is controlled by API keys, never by cookies. Clients reuse connections, and there is a delay before a load
    balancer stops using a gateway replica that is not ready. Requests already sent are still served, and the client's
    next connection reaches another gateway replica.
    """
    if hdrs.ORIGIN in request.headers:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*"
    if request.app[RUNTIME].draining:
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()


async def _health(request: web.Request) -> web.Response:
    """The health of the gateway, for clients and load balancers that probe the public port. It requires no API key."""
    ready = request.app[RUNTIME].ready
    return _json({"status": "ok" if ready else "unavailable"}, 200 if ready else 503)


async def _version(request: web.Request) -> web.Response:
    return _json({"version": installed_version()})


async def _openapi(request: web.Request) -> web.Response:
    """The description of this port. It requires no API key, because it is the same for all gateways of a version."""
    body = await asyncio.to_thread(encoded, installed_version())
    return web.Response(body=body, content_type="application/json")


def _json(document: dict[str, str], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")


def _handler(
    route: str,
    metric_label: str,
    serve: Callable[[Call], Awaitable[web.StreamResponse]],
    record: Callable[[Call], None] = lambda call: None,
) -> Handler:
    """Returns the aiohttp handler that serves calls with `serve`, and calls `record` when one has ended.

    `route` is the path or pattern that spans record; `metric_label` is the route in metrics. Every call is
    traced and counted, and every exception becomes an error object or, after the headers have been sent, a
    closed connection.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        runtime = request.app[RUNTIME]
        span = runtime.tracing.server_span(request.method, route, request.headers)
        request_id = request_id_of(request)
        call = Call(runtime, request, request_id, span, time.perf_counter())
        failure: Exception | None = None
        try:
            call.timeout_seconds = timeout_seconds_of(request.headers)
            return await serve(call)
        except ConnectionResetError:
            call.outcome = Outcome.CLIENT_CLOSED
            call.abort()
            return call.response or web.Response(status=call.status)
        except Exception as error:
            failure, call.outcome = error, Outcome.FAILED
            if call.response is not None:
                log.exception("request %s failed after its response had begun", call.request_id)
                call.status = 500
                call.abort()
                return call.response
            response = error_response(error, call.request_id, call.errors, call.headers)
            call.status = response.status
            return response
        finally:
            call.ended()
            record(call)
            if runtime.access_log is not None:
                runtime.access_log.add(_access_entry(call, route))
            runtime.metrics.requests.labels(metric_label, str(call.status)).inc()
            end_server_span(span, call.status, failure)

    return handle


def _access_entry(call: Call, route: str) -> dict[str, Any]:
    """The line of the access log for a call that has ended. docs/gateway.md describes the fields for users."""
    seconds = time.perf_counter() - call.started
    usage = call.usage
    return {
        "time": round(time.time() - seconds, 6),
        "request_id": call.request_id,
        "tenant": call.tenant,
        "method": call.request.method,
        "route": route,
        "status": call.status,
        "outcome": call.outcome.value,
        "seconds": round(seconds, 6),
        "pool": call.attempt[0].value if call.attempt is not None else None,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "output_tokens": usage.completion_tokens if usage else None,
        "cached_tokens": usage.cached_tokens if usage else None,
    }
