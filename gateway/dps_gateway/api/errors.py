"""From what can go wrong to an HTTP status and an OpenAI error object: the one place where this is decided."""

import logging
from dataclasses import dataclass
from typing import Final

import orjson
from aiohttp import web

from dps_gateway.auth import Unauthorized
from dps_gateway.upstream.exchange import UpstreamBroken, UpstreamFailed
from dps_gateway.upstream.pool import PoolEmpty, PoolFull

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS: Final = 1


class BadRequest(Exception):
    """The client's request cannot be understood; the message says what to change."""


class BodyTooLarge(Exception):
    """The request's body is over limits.maxBodyBytes."""


@dataclass(frozen=True, slots=True)
class _Problem:
    status: int
    type: str
    code: str
    retry: bool = False


_PROBLEMS: Final[dict[type[Exception], _Problem]] = {
    BadRequest: _Problem(400, "invalid_request_error", "bad_request"),
    Unauthorized: _Problem(401, "authentication_error", "invalid_api_key"),
    BodyTooLarge: _Problem(413, "invalid_request_error", "request_too_large"),
    PoolFull: _Problem(429, "rate_limit_error", "overloaded", retry=True),
    UpstreamFailed: _Problem(502, "server_error", "upstream_failed"),
    UpstreamBroken: _Problem(502, "server_error", "upstream_broken"),
    PoolEmpty: _Problem(503, "server_error", "no_engine_ready", retry=True),
}
_UNEXPECTED: Final = _Problem(500, "server_error", "internal_error")


def _problem(error: Exception) -> _Problem:
    return next((_PROBLEMS[kind] for kind in type(error).__mro__ if kind in _PROBLEMS), _UNEXPECTED)


def error_object(error: Exception) -> bytes:
    """The error as OpenAI's clients read it. An unexpected one does not show its insides."""
    problem = _problem(error)
    message = str(error) if problem is not _UNEXPECTED else "the gateway failed; its log has the details"
    return orjson.dumps(
        {"error": {"message": message, "type": problem.type, "param": None, "code": problem.code}}
    )


def error_event(error: Exception) -> bytes:
    """The event that ends a stream which cannot go on."""
    return b"data: " + error_object(error) + b"\n\n"


def _response(error: Exception) -> web.Response:
    problem = _problem(error)
    if isinstance(error, UpstreamFailed) and error.answer is not None:
        status, said = error.answer
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else None
        return web.Response(
            status=status, body=said or error_object(error), headers=headers, content_type="application/json"
        )
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if problem.retry else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=problem.status, body=error_object(error), headers=headers, content_type="application/json"
    )


def error_response(error: Exception, request_id: str) -> web.Response:
    """The answer to a request that failed before anything was sent. An unexpected error is a bug: it is logged."""
    if _problem(error) is _UNEXPECTED:
        log.error("request %s failed", request_id, exc_info=error)
    response = _response(error)
    response.headers["x-request-id"] = request_id
    return response
