"""Checks responses against an OpenAPI description."""

import re
from typing import Any

import httpx2
from schemathesis import APIOperation, Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dps_testkit.waiting import PATIENCE_SECONDS

CHECKS = (
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


def check(operation: APIOperation[Any, Any, Any, Any], response: httpx2.Response) -> None:
    """Raise schemathesis's FailureGroup if a response differs from the operation's description."""
    parameters = dict.fromkeys(re.findall(r"{(\w+)}", operation.path), "x")
    operation.Case(path_parameters=parameters).validate_response(response, checks=list(CHECKS))


def answer(
    operation: APIOperation[Any, Any, Any, Any], base_url: str, body: Any = None, **options: Any
) -> Response:
    """The response to a request, checked like `check`. `options`: `headers` and `path_parameters`."""
    case = operation.Case(body=body, **options) if body is not None else operation.Case(**options)
    response = case.call(base_url=base_url, timeout=PATIENCE_SECONDS)
    case.validate_response(response, checks=list(CHECKS))
    return response
