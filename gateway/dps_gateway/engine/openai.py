"""The OpenAI API's answers and errors, whose format the common engines share. This module performs no I/O."""

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
from dps_gateway.engine.sources import REQUEST_FIELD, cached_tokens_details, fetched_tokens


class _OpenAIAnswers:
    """Answers of /v1/chat/completions and /v1/completions.

    A stream reports usage only if the request sets stream_options.include_usage.
    """

    closing = (b"data: [DONE]",)
    usage_marker = re.compile(rb'"(?:usage|sglext)":\s*\{')
    part_marker = None

    def request_usage(
        self, body: Mapping[str, Any], raw: bytes, *, sources: bool
    ) -> tuple[bytes, RequestedByGateway]:
        added: dict[str, Any] = {}
        if body.get("stream") is True:
            options = body.get("stream_options")
            options = options if isinstance(options, dict) else {}
            if not options.get("include_usage"):
                added["stream_options"] = options | {"include_usage": True}
        if sources and not body.get(REQUEST_FIELD):
            added[REQUEST_FIELD] = True
        if not added or not body:
            return raw, RequestedByGateway()
        requested = RequestedByGateway(usage="stream_options" in added, sources=REQUEST_FIELD in added)
        if added.keys() & body.keys():
            try:
                return orjson.dumps({**body, **added}), requested
            except orjson.JSONEncodeError:  # nested too deeply for the encoder, but not for the decoder
                return raw, RequestedByGateway()
        start = raw.index(b"{") + 1
        return raw[:start] + orjson.dumps(added)[1:-1] + b"," + raw[start:], requested

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


class _ResponsesAnswers:
    """Answers of /v1/responses. A stream reports usage in its last event, which contains the whole response.

    Its first event contains the response's id.
    """

    closing = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
    usage_marker = re.compile(rb'"(?:usage":\s*\{|response\.created")')
    part_marker = None

    def request_usage(
        self, body: Mapping[str, Any], raw: bytes, *, sources: bool
    ) -> tuple[bytes, RequestedByGateway]:
        return raw, RequestedByGateway()

    def usage_of(self, document: Any) -> Usage | None:
        if not isinstance(document, dict):
            return None
        response = document.get("response", document)
        if not isinstance(response, dict) or response.get("object") != "response":
            return None
        usage = response.get("usage")
        if not isinstance(usage, dict):
            usage = {}
        details = usage.get("input_tokens_details")
        cached = token_count(details.get("cached_tokens")) if isinstance(details, dict) else None
        return Usage(
            prompt_tokens=token_count(usage.get("input_tokens")) or 0,
            completion_tokens=token_count(usage.get("output_tokens")) or 0,
            # SGLang also reports 0 if it is not configured to report cached tokens.
            cached_tokens=cached or None,
            finish_reason=text_or_none(response.get("status")),
            response_id=text_or_none(response.get("id")),
            model=text_or_none(response.get("model")),
        )


RESPONSES_ANSWERS: Final[AnswerFormat] = _ResponsesAnswers()


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


class _ResponsesErrors(_OpenAIErrors):
    """OpenAI error objects. In a stream of /v1/responses, an error is an event of type `error`."""

    def event(self, body: bytes) -> bytes:
        error = orjson.loads(body)["error"]
        fields = {"type": "error", **{name: error[name] for name in ("code", "message", "param")}}
        # OpenAI's SDKs raise an exception for an event that has an error object.
        return b"event: error\ndata: " + orjson.dumps(fields | {"error": error}) + b"\n\n"


RESPONSES_ERRORS: Final[ErrorFormat] = _ResponsesErrors()
