"""Maps errors to HTTP statuses and to error objects in the format of the endpoint. No other module does."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from dps_gateway.auth import Forbidden, Unauthorized
from dps_gateway.engine.anthropic import ANTHROPIC_ERRORS
from dps_gateway.engine.dialect import ErrorFormat
from dps_gateway.engine.openai import OPENAI_ERRORS, RESPONSES_ERRORS
from dps_gateway.key_limits import KeyBusy, KeyExhausted
from dps_gateway.upstream.admission import PoolEmpty, PoolFull
from dps_gateway.upstream.exchange import OutOfFiles, UpstreamBroken, UpstreamFailed

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS: Final = 1


class BadRequest(Exception):
    """The request is malformed. The message states what to change."""


class BodyTooLarge(Exception):
    """The request body exceeds limits.maxBodyBytes."""


class BodyTooSlow(Exception):
    """The request body did not arrive within timeouts.bodySeconds, or arrived below limits.minBodyBytesPerSecond."""


class GatewayFull(Exception):
    """The gateway has reached limits.maxConnections or limits.maxBufferedBytes."""


class NotFound(Exception):
    """The gateway has no such endpoint."""


class ModelNotFound(Exception):
    """The request is for a model that is not served. The message names those that are."""


class ResponseNotFound(Exception):
    """No engine holds the stored response that the request refers to."""


class Suspended(Exception):
    """The engines are stopped on purpose."""


class TenantsNotSeparated(Exception):
    """No ready engine separates the tenant's cached tokens from those of others. The message states what to change."""


class ExpectationFailed(Exception):
    """The request has an Expect header that the gateway does not support."""


class DeadlineExceeded(Exception):
    """No engine has answered within the time that the client allows."""


class MethodNotAllowed(Exception):
    """The endpoint does not support the request's method."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """How an exception is answered.

    retry: whether the response has the header Retry-After.
    """

    status: int
    type: str
    code: str
    retry: bool = False


_PROBLEMS: Final[dict[type[Exception], _Problem]] = {
    BadRequest: _Problem(400, "invalid_request_error", "bad_request"),
    Unauthorized: _Problem(401, "authentication_error", "invalid_api_key"),
    Forbidden: _Problem(403, "permission_error", "model_not_allowed"),
    ModelNotFound: _Problem(404, "invalid_request_error", "model_not_found"),
    ResponseNotFound: _Problem(404, "invalid_request_error", "response_not_found"),
    NotFound: _Problem(404, "invalid_request_error", "not_found"),
    MethodNotAllowed: _Problem(405, "invalid_request_error", "method_not_allowed"),
    BodyTooSlow: _Problem(408, "invalid_request_error", "request_timeout"),
    BodyTooLarge: _Problem(413, "invalid_request_error", "request_too_large"),
    ExpectationFailed: _Problem(417, "invalid_request_error", "expectation_failed"),
    KeyBusy: _Problem(429, "rate_limit_error", "too_many_in_flight", retry=True),
    KeyExhausted: _Problem(429, "rate_limit_error", "rate_limit_exceeded", retry=True),
    PoolFull: _Problem(429, "rate_limit_error", "overloaded", retry=True),
    UpstreamFailed: _Problem(502, "server_error", "upstream_failed"),
    UpstreamBroken: _Problem(502, "server_error", "upstream_broken"),
    DeadlineExceeded: _Problem(504, "server_error", "deadline_exceeded"),
    GatewayFull: _Problem(503, "server_error", "gateway_overloaded", retry=True),
    OutOfFiles: _Problem(503, "server_error", "gateway_overloaded", retry=True),
    PoolEmpty: _Problem(503, "server_error", "no_engine_ready", retry=True),
    TenantsNotSeparated: _Problem(503, "server_error", "tenants_not_separated", retry=True),
    Suspended: _Problem(503, "server_error", "suspended", retry=True),
}
_UNEXPECTED: Final = _Problem(500, "server_error", "internal_error")


def _problem(error: Exception) -> _Problem:
    return next((_PROBLEMS[kind] for kind in type(error).__mro__ if kind in _PROBLEMS), _UNEXPECTED)


def codes_by_status() -> dict[int, list[str]]:
    """The statuses of the gateway's error responses, in ascending order, and the codes that each is used with."""
    codes: dict[int, list[str]] = {}
    for problem in sorted(_PROBLEMS.values(), key=lambda problem: problem.status):
        used = codes.setdefault(problem.status, [])
        if problem.code not in used:
            used.append(problem.code)
    return codes


def errors_of(path: str) -> ErrorFormat:
    """The format of the errors of an endpoint."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC_ERRORS
    return RESPONSES_ERRORS if path.startswith("/v1/responses") else OPENAI_ERRORS


def error_object(error: Exception, errors: ErrorFormat = OPENAI_ERRORS) -> bytes:
    """The error object for an error. An unexpected error is not described to the client."""
    problem = _problem(error)
    message = str(error) if problem is not _UNEXPECTED else "internal error; see the gateway's log"
    return errors.error(problem.status, problem.type, problem.code, message)


def error_event(error: Exception, errors: ErrorFormat) -> bytes:
    """The event that ends a stream which cannot continue."""
    return errors.event(error_object(error, errors))


def error_response(
    error: Exception, request_id: str, errors: ErrorFormat, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The response to a request that failed before its response had begun, with `headers` added.

    An unexpected error is a bug and is logged with its traceback.
    """
    problem = _problem(error)
    if problem is _UNEXPECTED:
        log.error("request %s failed", request_id, exc_info=error)
    status, body = problem.status, error_object(error, errors)
    retry_after = str(RETRY_AFTER_SECONDS) if problem.retry else None
    if isinstance(error, KeyExhausted):
        retry_after = str(error.retry_after_seconds)
    if isinstance(error, UpstreamFailed) and error.rejection is not None:
        status = error.rejection.status
        retry_after = error.rejection.retry_after
        if retry_after is None and status in (429, 503):
            retry_after = str(RETRY_AFTER_SECONDS)
        if error.rejection.body:
            body = errors.of_engine(status, error.rejection.body)
    response = web.Response(status=status, body=body, headers=headers, content_type="application/json")
    response.headers["x-request-id"] = request_id
    if retry_after is not None:
        response.headers["Retry-After"] = retry_after
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
