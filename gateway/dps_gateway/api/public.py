"""The application on the public port: its routes, errors as JSON, and cross-origin requests."""

import asyncio
from typing import Final

import orjson
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from dps_gateway import installed_version
from dps_gateway.api.call import RUNTIME, request_id_of
from dps_gateway.api.endpoints import ENDPOINTS, errors_of
from dps_gateway.api.errors import Problem, Refused, error_response
from dps_gateway.api.inference import routed_endpoint
from dps_gateway.api.openapi import encoded
from dps_gateway.api.passthrough import RELAYED_GET, RELAYED_POST, pass_through
from dps_gateway.runtime import Runtime

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
        app.router.add_post(endpoint.path, routed_endpoint(endpoint), expect_handler=_expect)
    for path in RELAYED_GET:
        app.router.add_get(path, pass_through, expect_handler=_expect)
    for path in RELAYED_POST:
        app.router.add_post(path, pass_through, expect_handler=_expect)
    app.router.add_route("*", "/v1/{rest:.*}", pass_through, expect_handler=_expect)
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
        return _preflight(request)
    headers: dict[str, str] = {}
    try:
        _check_headers(request)
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


def _check_headers(request: web.Request) -> None:
    """Raises Refused. The limit of the parser is higher, because its own answer does not name the limit."""
    limit = request.app[RUNTIME].config.listen.max_header_bytes
    for name, value in request.raw_headers:
        if len(value) > limit:
            raise Refused(
                Problem.HEADER_TOO_LARGE,
                f"the header {name.decode(errors='replace')} has {len(value)} bytes, more than the {limit} of "
                "listen.maxHeaderBytes",
            )


def _preflight(request: web.Request) -> web.Response:
    """Allow a cross-origin request. Browsers send preflight requests without credentials."""
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: request.headers[hdrs.ACCESS_CONTROL_REQUEST_METHOD],
        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*"),
        hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_MAX_AGE_SECONDS),
    }
    return web.Response(status=204, headers=headers)


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
