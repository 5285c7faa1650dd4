"""Token usage in the OpenAI API's answers, which the common engines share. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from dps_gateway.engine.dialect import AnswerFormat, Usage, text_or_none, token_count

_INCLUDE_USAGE: Final = b'"stream_options":{"include_usage":true},'


class _OpenAIAnswers:
    """Answers of /v1/chat/completions and /v1/completions. A stream reports usage only if asked to."""

    usage_marker = re.compile(rb'"usage":\s*\{')

    def ask_for_usage(self, body: Mapping[str, Any], raw: bytes) -> tuple[bytes, bool]:
        if body.get("stream") is not True:
            return raw, False
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            return raw, False
        if "stream_options" in body:
            merged = (options if isinstance(options, dict) else {}) | {"include_usage": True}
            return orjson.dumps({**body, "stream_options": merged}), True
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
