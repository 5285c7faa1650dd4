"""How an engine's answer begins and ends, from everything that shows it. This module performs no I/O."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

FAILURE_MARKERS: Final = (b'"error"', b'"abort"', b'"failed"', b'"output_tokens":0', b'"output_tokens": 0')
"""Every event that reports a failure contains one of these texts, so that other events need no parsing. Quotes in
generated text are escaped, so it never contains them."""

_ENDED: Final = ("abort", "error")
"""Finish reasons with which SGLang and vLLM end an answer early, for example because they shut down."""

_WITHOUT_CONTENT: Final = frozenset(
    {
        *("message_start", "ping"),
        *("response.created", "response.queued", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    }
)
"""Types of stream events of /v1/messages and /v1/responses that precede the first content."""

ANTHROPIC_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}
"""Anthropic's error types by HTTP status; all others are `api_error`."""

_STATUSES: Final = {kind: status for status, kind in reversed(ANTHROPIC_ERROR_TYPES.items())}
"""HTTP statuses of Anthropic's error types, the lowest of each; that of all others is 500."""

_WRAPPED_STATUS: Final = re.compile(r"(429|50[0-9]): ")
"""SGLang refuses a request to /v1/responses, if its queue is full, with 400 and the message "503: The request queue is
full."."""


class Outcome(StrEnum):
    """How the answer to a request has ended."""

    COMPLETE = "complete"
    FAILED = "failed"
    """The engine refused the request, or no engine answered it."""
    BROKEN = "broken"
    """The engine began to answer, but did not finish."""
    ABORTED = "aborted"
    """The engine ended the answer early, and said so."""
    CLIENT_CLOSED = "client_closed"
    """The client disconnected before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure that an engine reports in an answer or stream event whose HTTP status is 200."""

    status: int | None
    """The HTTP status that belongs to the failure; None if the engine has ended the answer early."""
    message: str
    reported: bool
    """Whether the event is an error to the client, too, and not the end of an answer."""


def failure_of(document: Any) -> Failure | None:
    """The failure that a parsed answer or stream event of any routed API reports.

    SGLang answers a full queue with an event that has an `error`, and ends aborted answers with the finish reason
    `abort`. For /v1/messages it replaces that finish reason by `end_turn`, so that only the lack of tokens shows that
    the answer has been aborted.
    """
    if isinstance(document, list):
        return next((found for each in document if (found := failure_of(each)) is not None), None)
    if not isinstance(document, dict):
        return None
    if (error := document.get("error")) and document.get("object") != "response":
        return _error(error)
    response = document.get("response", document)
    match document:
        case {"type": "error"}:
            return _error(document)
        case {"choices": list(choices)}:
            reasons = [each.get("finish_reason") for each in choices if isinstance(each, dict)]
            ended = next((reason for reason in reasons if reason in _ENDED), None)
            return _ended(ended) if ended else None
        case {"meta_info": {"finish_reason": {"type": "abort", **finish}}}:
            status = finish.get("status_code")
            return Failure(
                status if isinstance(status, int) else None, str(finish.get("message") or "abort"), True
            )
        case {"type": "message_delta" | "message", "usage": {"output_tokens": 0}}:
            ending = document.get("delta", document)
            return _ended("no token") if isinstance(ending, dict) and ending.get("stop_reason") else None
    if (
        isinstance(response, dict)
        and response.get("status") == "failed"
        and response.get("object") == "response"
    ):
        return Failure(None, _message(response.get("error")) or "failed", True)
    return None


def _ended(reason: str) -> Failure:
    return Failure(None, f"the engine ended the answer early ({reason})", False)


def _error(error: Any) -> Failure:
    fields = error if isinstance(error, dict) else {}
    code, message = fields.get("code"), _message(error)
    status = (
        code if isinstance(code, int) and 400 <= code < 600 else _STATUSES.get(str(fields.get("type")), 500)
    )
    if status == 400 and (found := _WRAPPED_STATUS.match(message)):
        status = int(found[1])
    return Failure(status, message or "the engine reported an error", True)


def _message(error: Any) -> str:
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")


def failure_in(content: bytes) -> Failure | None:
    """The failure that the bytes of an answer, or of the data of a stream event, report."""
    if not any(map(content.__contains__, FAILURE_MARKERS)):
        return None
    try:
        return failure_of(orjson.loads(content))
    except orjson.JSONDecodeError:
        return None


def has_content(document: Any) -> bool:
    """Whether a stream event contains more than the beginning of an answer, such as the role of its message."""
    match document:
        case {"choices": list(choices)}:
            return any(_has_content(choice) for choice in choices)
        case {"text": "", "meta_info": {"finish_reason": None}}:
            return False
        case {"type": "content_block_start", "content_block": {"type": "text", "text": ""}}:
            return False
        case {"type": str(kind)}:
            return kind not in _WITHOUT_CONTENT
        case _:
            return True


def _has_content(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
        return True
    delta = choice.get("delta", {})
    if not isinstance(delta, dict):
        return True
    return bool(choice.get("text")) or any(value for name, value in delta.items() if name != "role")
