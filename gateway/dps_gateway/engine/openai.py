"""The OpenAI API's answers and errors, whose format the common engines share. This module performs no I/O."""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from dps_gateway.engine.dialect import AnswerFormat, ErrorFormat, Usage, text_or_none, token_count

_INCLUDE_USAGE: Final = b'"stream_options":{"include_usage":true},'


class _OpenAIAnswers:
    """Answers of /v1/chat/completions and /v1/completions.

    A stream reports usage only if the request sets stream_options.include_usage.
    """

    closing = b"data: [DONE]"
    usage_marker = re.compile(rb'"usage":\s*\{')

    def ask_for_usage(self, body: Mapping[str, Any], raw: bytes) -> tuple[bytes, bool]:
        if body.get("stream") is not True:
            return raw, False
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            return raw, False
        if "stream_options" in body:
            merged = (options if isinstance(options, dict) else {}) | {"include_usage": True}
            try:
                return orjson.dumps({**body, "stream_options": merged}), True
            except orjson.JSONEncodeError:  # nested too deeply for the encoder, but not for the decoder
                return raw, False
        start = raw.index(b"{") + 1
        return raw[:start] + _INCLUDE_USAGE + raw[start:], True

    def usage_of(self, document: Any) -> Usage | None:
        usage = document.get("usage") if isinstance(document, dict) else None
        if not isinstance(usage, dict):
            return None
        prompt_tokens = token_count(usage.get("prompt_tokens"))
        if prompt_tokens is None:
            return None
        details = usage.get("prompt_tokens_details")
        choices = document.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=token_count(usage.get("completion_tokens")) or 0,
            cached_tokens=token_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            finish_reason=text_or_none(choice.get("finish_reason")) if isinstance(choice, dict) else None,
            response_id=text_or_none(document.get("id")),
            model=text_or_none(document.get("model")),
        )


OPENAI_ANSWERS: Final[AnswerFormat] = _OpenAIAnswers()


def error_object_of(status: int, content: bytes) -> bytes:
    """An engine's error body as an OpenAI error object, which is where clients look for `error.message`.

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


class _OpenAIErrors:
    """OpenAI error objects."""

    def error(self, status: int, kind: str, code: str, message: str) -> bytes:
        return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})

    def of_engine(self, status: int, content: bytes) -> bytes:
        return error_object_of(status, content)

    def event(self, body: bytes) -> bytes:
        return b"data: " + body + b"\n\n"


OPENAI_ERRORS: Final[ErrorFormat] = _OpenAIErrors()
