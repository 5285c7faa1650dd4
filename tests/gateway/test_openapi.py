"""The OpenAPI description lists the routes and the errors of the public port."""

from datetime import timedelta

import httpx2
import pytest
import schemathesis
from aiohttp import web

from dps_gateway.api.endpoints import errors_of
from dps_gateway.api.errors import (
    BadRequest,
    Problem,
    Refused,
    codes_by_status,
    error_response,
)
from dps_gateway.api.openapi import METHODS, description
from dps_gateway.api.public import public_app
from dps_gateway.auth import KeyBusy, KeyExhausted, Unauthorized
from dps_gateway.runtime import Runtime
from dps_gateway.upstream.admission import PoolEmpty
from dps_gateway.upstream.exchange import Rejection, UpstreamFailed
from tests.gateway.openapi_checks import check

DESCRIPTION = description("1.2.3")
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
OPERATIONS = {
    (path, method.upper()): item[method]
    for path, item in DESCRIPTION["paths"].items()
    for method in sorted(METHODS & item.keys())
}
REST = "/v1/{rest}"
ERRORS = [
    BadRequest("the body must be a JSON object"),
    Unauthorized("the API key is not valid"),
    Refused(Problem.MODEL_NOT_FOUND, "the model 'x' is not served"),
    Refused(Problem.BODY_TOO_LARGE, "the request is too large"),
    KeyBusy("the API key has 8 requests in flight"),
    KeyExhausted("60 requests", 30),
    PoolEmpty("no engine is ready"),
    Refused(Problem.SUSPENDED, "the engines are stopped"),
    Refused(Problem.DEADLINE_EXCEEDED, "no engine answered within 1 s"),
    UpstreamFailed("connect", "the engine cannot be reached"),
    UpstreamFailed("status_429", "the engine answered 429", Rejection(429, b"slow down", None)),
    UpstreamFailed(
        "status_503", "the engine answered 503", Rejection(503, b'{"detail":[{"msg":"x"}]}', None)
    ),
    RuntimeError("a bug"),
]


def test_description_is_valid() -> None:
    SCHEMA.validate()
    assert DESCRIPTION["info"]["version"] == "1.2.3"


async def test_every_route_is_described_and_every_described_operation_has_a_route(runtime: Runtime) -> None:
    routes = {
        (route.resource.canonical, route.method)
        for route in public_app(runtime).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    below_v1 = {
        (path, method)
        for (path, method), operation in OPERATIONS.items()
        if path.startswith("/v1/") and operation["tags"] == ["relayed"]
    }
    assert (OPERATIONS.keys() - below_v1) | {(REST, "*")} == routes
    assert {method for path, method in below_v1 if path == REST} == {method.upper() for method in METHODS}


@pytest.mark.parametrize(
    ("path", "method"), [key for key, operation in OPERATIONS.items() if operation["tags"] != ["gateway"]]
)
def test_every_error_of_a_proxied_operation_is_described(path: str, method: str) -> None:
    assert {str(status) for status in codes_by_status()} <= OPERATIONS[path, method]["responses"].keys()
    for error in ERRORS:
        answer = error_response(error, "request-1", errors_of(path))
        check(SCHEMA[path][method], received(answer, method))


def received(response: web.Response, method: str) -> httpx2.Response:
    """A response as a client receives it."""
    assert isinstance(response.body, bytes)
    request = httpx2.Request(method, "http://gateway")
    answer = httpx2.Response(
        response.status, headers=dict(response.headers), content=response.body, request=request
    )
    answer.elapsed = timedelta()
    return answer
