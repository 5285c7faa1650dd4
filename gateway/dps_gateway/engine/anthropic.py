"""The answers and errors of Anthropic's Messages API. This module performs no I/O."""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from dps_gateway.engine.dialect import (
    AnswerFormat,
    ErrorFormat,
    RequestedByGateway,
    Usage,
    text_or_none,
    token_count,
)
from dps_gateway.engine.openai import error_object_of

_PROMPT_FIELDS: Final = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")

_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types by HTTP status; all others are `api_error`."""


class _AnthropicAnswers:
    """Answers of /v1/messages.

    A stream reports the prompt's tokens in its first event (`message_start`) and the completion's in the last but one
    (`message_delta`). `input_tokens` excludes the cached tokens.
    """

    closing = (b"event: message_stop",)
    usage_marker = re.compile(rb'"usage":\s*\{')
    part_marker = None

    def request_usage(
        self, body: Mapping[str, Any], raw: bytes, *, sources: bool
    ) -> tuple[bytes, RequestedByGateway]:
        return raw, RequestedByGateway()

    def usage_of(self, document: Any) -> Usage | None:
        if not isinstance(document, dict):
            return None
        message = document.get("message", document)
        usage = message.get("usage") if isinstance(message, dict) else None
        if not isinstance(usage, dict):
            return None
        delta = document.get("delta")
        ending = delta if isinstance(delta, dict) else message
        return Usage(
            prompt_tokens=sum(token_count(usage.get(name)) or 0 for name in _PROMPT_FIELDS),
            completion_tokens=token_count(usage.get("output_tokens")) or 0,
            cached_tokens=token_count(usage.get("cache_read_input_tokens")),
            finish_reason=text_or_none(ending.get("stop_reason")),
            response_id=text_or_none(message.get("id")),
            model=text_or_none(message.get("model")),
        )


class _AnthropicErrors:
    """Anthropic error objects: `{"type": "error", "error": {"type": ..., "message": ...}}`."""

    def error(self, status: int, kind: str, code: str, message: str) -> bytes:
        error = {"type": _ERROR_TYPES.get(status, "api_error"), "message": message}
        return orjson.dumps({"type": "error", "error": error})

    def of_engine(self, status: int, content: bytes) -> bytes:
        converted = error_object_of(status, content)
        document = orjson.loads(converted)
        if document.get("type") == "error":
            return content
        return self.error(status, "", "", str(document["error"]["message"]))

    def event(self, body: bytes) -> bytes:
        return b"event: error\ndata: " + body + b"\n\n"


ANTHROPIC_ANSWERS: Final[AnswerFormat] = _AnthropicAnswers()
ANTHROPIC_ERRORS: Final[ErrorFormat] = _AnthropicErrors()
