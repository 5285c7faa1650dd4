"""Maps errors to HTTP statuses and to error objects in the format of the endpoint. No other module does."""

import logging
from collections.abc import Mapping
from enum import Enum
from typing import Final

import orjson
from aiohttp import web

from dps_gateway.auth import Forbidden, KeyBusy, KeyExhausted, Unauthorized
from dps_gateway.engine.usage import text_or_none
from dps_gateway.upstream.admission import PoolEmpty, PoolFull
from dps_gateway.upstream.exchange import OutOfFiles, UpstreamBroken, UpstreamFailed

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS: Final = 1


class Problem(Enum):
    """Why a request fails: the status, `type` and `code` of the error, and whether the header Retry-After is sent."""

    def __init__(self, status: int, kind: str, code: str, retry: bool = False) -> None:
        self.status = status
        self.kind = kind
        self.code = code
        self.retry = retry

    BAD_REQUEST = 400, "invalid_request_error", "bad_request"
    INVALID_API_KEY = 401, "authentication_error", "invalid_api_key"
    MODEL_NOT_ALLOWED = 403, "permission_error", "model_not_allowed"
    MODEL_NOT_FOUND = 404, "invalid_request_error", "model_not_found"
    RESPONSE_NOT_FOUND = 404, "invalid_request_error", "response_not_found"
    NOT_FOUND = 404, "invalid_request_error", "not_found"
    METHOD_NOT_ALLOWED = 405, "invalid_request_error", "method_not_allowed"
    BODY_TOO_SLOW = 408, "invalid_request_error", "request_timeout"
    BODY_TOO_LARGE = 413, "invalid_request_error", "request_too_large"
    UNSUPPORTED_ENCODING = 415, "invalid_request_error", "unsupported_encoding"
    UPGRADE_REFUSED = 426, "invalid_request_error", "upgrade_refused"
    EXPECTATION_FAILED = 417, "invalid_request_error", "expectation_failed"
    HEADER_TOO_LARGE = 431, "invalid_request_error", "header_too_large"
    KEY_BUSY = 429, "rate_limit_error", "too_many_in_flight", True
    KEY_EXHAUSTED = 429, "rate_limit_error", "rate_limit_exceeded", True
    OVERLOADED = 429, "rate_limit_error", "overloaded", True
    INTERNAL_ERROR = 500, "server_error", "internal_error"
    UPSTREAM_FAILED = 502, "server_error", "upstream_failed"
    UPSTREAM_BROKEN = 502, "server_error", "upstream_broken"
    DEADLINE_EXCEEDED = 504, "server_error", "deadline_exceeded"
    GATEWAY_FULL = 503, "server_error", "gateway_overloaded", True
    NO_ENGINE_READY = 503, "server_error", "no_engine_ready", True
    TENANTS_NOT_SEPARATED = 503, "server_error", "tenants_not_separated", True
    SUSPENDED = 503, "server_error", "suspended", True


class Refused(Exception):
    """The gateway refuses the request. The message states the reason or what to change."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem
        self.error_type = problem.name.title().replace("_", "")
        """The span attribute `error.type`, such as `ModelNotFound`."""


class BadRequest(Refused):
    """The request is malformed. The message states what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(Problem.BAD_REQUEST, message)


_PROBLEMS: Final[dict[type[Exception], Problem]] = {
    Unauthorized: Problem.INVALID_API_KEY,
    Forbidden: Problem.MODEL_NOT_ALLOWED,
    KeyBusy: Problem.KEY_BUSY,
    KeyExhausted: Problem.KEY_EXHAUSTED,
    PoolFull: Problem.OVERLOADED,
    PoolEmpty: Problem.NO_ENGINE_READY,
    OutOfFiles: Problem.GATEWAY_FULL,
    UpstreamFailed: Problem.UPSTREAM_FAILED,
    UpstreamBroken: Problem.UPSTREAM_BROKEN,
}
"""The problems of exceptions that other parts of the gateway raise."""


def _problem(error: Exception) -> Problem:
    if isinstance(error, Refused):
        return error.problem
    return next((_PROBLEMS[kind] for kind in _PROBLEMS if isinstance(error, kind)), Problem.INTERNAL_ERROR)


def codes_by_status() -> dict[int, list[str]]:
    """The statuses of the gateway's expected errors, in ascending order, and the codes that each is used with."""
    codes: dict[int, list[str]] = {}
    for problem in sorted(Problem, key=lambda problem: problem.status):
        if problem is not Problem.INTERNAL_ERROR:
            codes.setdefault(problem.status, []).append(problem.code)
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
    message = str(error) if problem is not Problem.INTERNAL_ERROR else "internal error; see the gateway's log"
    return errors.error(problem.status, problem.kind, problem.code, message)


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
    if problem is Problem.INTERNAL_ERROR:
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
    if problem is Problem.UPGRADE_REFUSED:
        response.headers["Upgrade"] = "HTTP/1.1"  # RFC 9110, 15.5.22
    if problem is Problem.INVALID_API_KEY:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
