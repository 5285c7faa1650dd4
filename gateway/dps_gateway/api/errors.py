"""Maps errors to HTTP statuses and to error objects in the format of the endpoint. No other module does."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson
from aiohttp import web

from dps_gateway.auth import Forbidden, KeyBusy, KeyExhausted, Unauthorized
from dps_gateway.engine.usage import text_or_none
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
    """The gateway has reached limits.maxBufferedBytes."""


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
    """No engine has answered within the time that the client or timeouts.totalSeconds allows."""


class UnsupportedEncoding(Exception):
    """The request's body has a Content-Encoding that the gateway cannot decode."""


class HeaderTooLarge(Exception):
    """A header of the request exceeds listen.maxHeaderBytes."""


class UpgradeRefused(Exception):
    """The client asks for another protocol, such as WebSocket, which the endpoint does not support."""


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
    UnsupportedEncoding: _Problem(415, "invalid_request_error", "unsupported_encoding"),
    UpgradeRefused: _Problem(426, "invalid_request_error", "upgrade_refused"),
    ExpectationFailed: _Problem(417, "invalid_request_error", "expectation_failed"),
    HeaderTooLarge: _Problem(431, "invalid_request_error", "header_too_large"),
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


class OpenAIErrors:
    """The form of errors in the OpenAI API. Endpoints whose clients expect another one override the methods."""

    def error(self, status: int, kind: str, code: str, message: str) -> bytes:
        """The body for an error of the gateway; `kind` and `code` are OpenAI's `type` and `code`."""
        return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})

    def error_of_engine(self, status: int, content: bytes) -> bytes:
        """The body for an engine's error, whose own body is `content`.

        Bodies that already have this form are returned unchanged. SGLang and vLLM also use
        `{"object": "error", "message": ...}`, and FastAPI, on which both are built, `{"detail": ...}`.
        """
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError:
            document = None
        fields = document if isinstance(document, dict) else {}
        if isinstance(fields.get("error"), dict) and "message" in fields["error"]:
            return content
        detail = fields.get("message") or fields.get("error") or fields.get("detail") or document
        if isinstance(detail, dict | list):
            detail = orjson.dumps(detail).decode()
        message = detail or content.decode(errors="replace").strip() or f"the engine answered {status}"
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {
            "message": str(message),
            "type": text_or_none(fields.get("type")) or kind,
            "param": fields.get("param"),
            "code": fields.get("code") or status,
        }
        return orjson.dumps({"error": error})

    def error_event(self, error: bytes) -> bytes:
        """The event that ends a stream with an error, whose body is `error`."""
        return b"data: " + error + b"\n\n"


def error_object(error: Exception, errors: OpenAIErrors) -> bytes:
    """The error object for an error. An unexpected error is not described to the client."""
    if isinstance(error, UpstreamFailed) and error.rejection is not None and error.rejection.body:
        return errors.error_of_engine(error.rejection.status, error.rejection.body)
    problem = _problem(error)
    message = str(error) if problem is not _UNEXPECTED else "internal error; see the gateway's log"
    return errors.error(problem.status, problem.type, problem.code, message)


def error_event(error: Exception, errors: OpenAIErrors) -> bytes:
    """The event that ends a stream which cannot continue."""
    return errors.error_event(error_object(error, errors))


def error_response(
    error: Exception, request_id: str, errors: OpenAIErrors, headers: Mapping[str, str] | None = None
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
    response = web.Response(status=status, body=body, headers=headers, content_type="application/json")
    response.headers["x-request-id"] = request_id
    if retry_after is not None:
        response.headers["Retry-After"] = retry_after
    if isinstance(error, UpgradeRefused):
        response.headers["Upgrade"] = "HTTP/1.1"  # RFC 9110, 15.5.22
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
