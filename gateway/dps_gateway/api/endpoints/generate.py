"""POST /generate, SGLang's native endpoint."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from dps_gateway.api.endpoints.base import (
    DeliveredText,
    NotContinuable,
    TextEndpoint,
    is_plain,
    limit,
    string,
    text_prompts,
)
from dps_gateway.api.endpoints.openai import DONE
from dps_gateway.engine.usage import Usage, fetched_tokens, text_or_none, token_count, total_usage
from dps_gateway.prompt.renderer import Prompt, PromptRenderer


class _Generate(TextEndpoint):
    """The `meta_info` of every event contains usage, even if it was not requested, and its text repeats the text of
    those before it.

    The answer to a batch, or to several samples of one prompt, is a list. In a stream, the events of each of these
    answers have its `index`.
    """

    path = "/generate"
    operation = "text_completion"
    # In SGLang 0.5.8, /generate ignores cache_salt, but has extra_key, which separates caches as well.
    salted = ("cache_salt", "extra_key")
    closing = (b"data: [DONE]",)
    usage_markers = (b'"meta_info"',)
    part_marker = re.compile(rb'"index":\s*(\d+)')

    def prompts(self, renderer: PromptRenderer, body: dict[str, Any]) -> list[Prompt]:
        text = body.get("text")
        return text_prompts(renderer, text if text is not None else body.get("input_ids"))

    def usage_of(self, document: Any) -> Usage | None:
        if isinstance(document, list):
            usages = [usage for answer in document if (usage := self.usage_of(answer)) is not None]
            if not usages or len(usages) != len(document):
                return None
            return usages[0] if len(usages) == 1 else total_usage(usages)
        meta = document.get("meta_info") if isinstance(document, dict) else None
        if not isinstance(meta, dict):
            return None
        prompt_tokens = token_count(meta.get("prompt_tokens"))
        if prompt_tokens is None:
            return None
        cached = token_count(meta.get("cached_tokens"))
        finish = meta.get("finish_reason")
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=token_count(meta.get("completion_tokens")) or 0,
            cached_tokens=cached,
            fetched_tokens=fetched_tokens(meta.get("cached_tokens_details"), cached),
            verifications=token_count(meta.get("spec_verify_ct")),
            finish_reason=text_or_none(finish.get("type")) if isinstance(finish, dict) else None,
            response_id=text_or_none(meta.get("id")),
        )

    def continuable(self, body: Mapping[str, Any]) -> bool:
        sampling = body.get("sampling_params")
        plain = sampling is None or (isinstance(sampling, dict) and is_plain(sampling))
        return plain and isinstance(body.get("text"), str) and not body.get("return_logprob")

    def read(self, event: dict[str, Any], received: DeliveredText) -> None:
        match event:
            # SGLang's --incremental-streaming-output sends events that do not begin with the earlier text.
            case {"text": str(text), "meta_info": dict(meta)} if text.startswith(received.text):
                received.text, received.event = text, event
                received.finished = meta.get("finish_reason") is not None
            case _:
                raise NotContinuable("an event does not repeat the text")

    def rest_request(self, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any] | None:
        sampling = {"max_new_tokens": 128, **(body.get("sampling_params") or {})}  # SGLang's default
        left = limit(sampling, text, tokens, "max_new_tokens", "min_new_tokens")
        return {**body, "text": body["text"] + text, "sampling_params": sampling} if left else None

    def join(
        self, event: dict[str, Any], received: DeliveredText, count: Callable[[dict[str, Any]], None]
    ) -> bool:
        begun = received.event
        if begun and isinstance(meta := event.get("meta_info"), dict):
            event["text"] = begun["text"] + string(event.get("text"))
            if "output_ids" in begun and "output_ids" in event:
                event["output_ids"] = begun["output_ids"] + event["output_ids"]
            count(meta)
            meta["id"] = begun["meta_info"].get("id")
        return True

    def ending(self, received: DeliveredText, usage: Usage | None) -> bytes:
        if received.finished:
            return DONE
        length = received.event["meta_info"].get("completion_tokens")
        received.event["meta_info"]["finish_reason"] = {"type": "length", "length": length}
        return b"data: " + orjson.dumps(received.event) + b"\n\n" + DONE


GENERATE: Final = _Generate()
