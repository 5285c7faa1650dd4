"""The OpenAI API's answers and errors, whose format the common engines share. This module performs no I/O."""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from dps_gateway.engine.dialect import AnswerFormat, Asked, ErrorFormat, Usage, text_or_none, token_count
from dps_gateway.engine.sources import REQUEST_FIELD, cached_tokens_details, fetched_tokens


class _OpenAIAnswers:
    """Answers of /v1/chat/completions and /v1/completions.

    A stream reports usage only if the request sets stream_options.include_usage.
    """

    closing = b"data: [DONE]"
    usage_marker = re.compile(rb'"(?:usage|sglext)":\s*\{')

    def ask_for_usage(self, body: Mapping[str, Any], raw: bytes, *, sources: bool) -> tuple[bytes, Asked]:
        added: dict[str, Any] = {}
        if body.get("stream") is True:
            options = body.get("stream_options")
            options = options if isinstance(options, dict) else {}
            if not options.get("include_usage"):
                added["stream_options"] = options | {"include_usage": True}
        if sources and not body.get(REQUEST_FIELD):
            added[REQUEST_FIELD] = True
        if not added or not body:
            return raw, Asked()
        asked = Asked(usage="stream_options" in added, sources=REQUEST_FIELD in added)
        if added.keys() & body.keys():
            try:
                return orjson.dumps({**body, **added}), asked
            except orjson.JSONEncodeError:  # nested too deeply for the encoder, but not for the decoder
                return raw, Asked()
        start = raw.index(b"{") + 1
        return raw[:start] + orjson.dumps(added)[1:-1] + b"," + raw[start:], asked

    def usage_of(self, document: Any) -> Usage | None:
        usage = document.get("usage") if isinstance(document, dict) else None
        if not isinstance(usage, dict):
            return None
        prompt_tokens = token_count(usage.get("prompt_tokens"))
        if prompt_tokens is None:
            return None
        details = usage.get("prompt_tokens_details")
        cached = token_count(details.get("cached_tokens")) if isinstance(details, dict) else None
        choices = document.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=token_count(usage.get("completion_tokens")) or 0,
            cached_tokens=cached,
            fetched_tokens=fetched_tokens(cached_tokens_details(document), cached),
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
