"""POST /v1/chat/completions and POST /v1/completions. This module performs no I/O."""

import re
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

import orjson

from dps_gateway.api.endpoints.base import (
    DeliveredText,
    NotContinuable,
    TextEndpoint,
    is_plain,
    limit,
    refuse_empty,
    string,
    text_prompts,
)
from dps_gateway.api.errors import BadRequest
from dps_gateway.engine.usage import Usage, fetched_tokens, text_or_none, token_count, total
from dps_gateway.prompt.renderer import Prompt, PromptRenderer

USAGE_FIELD: Final = "stream_options"
SOURCES_FIELD: Final = "return_cached_tokens_details"
DRAFTS_FIELD: Final = "return_spec_tokens_details"

DETAILS: Final = {SOURCES_FIELD: "cached_tokens_details", DRAFTS_FIELD: "spec_tokens_details"}
"""The fields of SGLang's extension `sglext`, by the request field that asks for them."""

DETAILS_MARKER: Final = b'"sglext"'
"""An answer or event with details contains this text, and generated text never does."""

DONE: Final = b"data: [DONE]\n\n"

_ALONE: Final = re.compile(rb',\s*"sglext":\s*\{\s*"([a-z_]+)":\s*\{[^{}]*\}\s*\}')
"""An extension with one field, whose name is group 1."""

_DELTA_FIELDS: Final = frozenset({"role", "content"})
_HEAD_FIELDS: Final = ("id", "object", "created", "model")
_CHOICE_FIELDS: Final = frozenset({"index", "delta", "text", "finish_reason", "matched_stop", "stop_reason"})


class _OpenAIEndpoint(TextEndpoint):
    """An endpoint with `choices`. A stream reports usage only if the request sets stream_options.include_usage.

    SGLang reports the sources of cached tokens and the accepted drafts in its extension `sglext` if the request asks
    for them and there are any. A stream has them in an event of its own before the one with usage.
    """

    closing = (b"data: [DONE]",)
    usage_markers = (b'"prompt_tokens"', DETAILS_MARKER)
    _empty: Mapping[str, Any] = {"text": ""}
    """The field of a choice that adds no text."""

    def added_fields(self, body: Mapping[str, Any], *, sources: bool, drafts: bool) -> dict[str, Any]:
        added: dict[str, Any] = {}
        if body.get("stream") is True:
            options = body.get(USAGE_FIELD)
            options = {} if options is None else options
            if not isinstance(options, dict):
                raise BadRequest(f"{USAGE_FIELD} must be an object")
            if not options.get("include_usage"):
                added[USAGE_FIELD] = options | {"include_usage": True}
        for name, wanted in ((SOURCES_FIELD, sources), (DRAFTS_FIELD, drafts)):
            if wanted and not body.get(name):
                added[name] = True
        return added

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
            fetched_tokens=fetched_tokens(_details(document).get("cached_tokens_details"), cached),
            verifications=_verifications(document),
            finish_reason=text_or_none(choice.get("finish_reason")) if isinstance(choice, dict) else None,
            response_id=text_or_none(document.get("id")),
            model=text_or_none(document.get("model")),
        )

    def continuable(self, body: Mapping[str, Any]) -> bool:
        return is_plain(body)

    def read(self, event: dict[str, Any], received: DeliveredText) -> None:
        match event.get("choices"):
            case []:
                received.usage_sent = received.usage_sent or bool(event.get("usage"))
            case [{"index": 0} as choice] if _has_only(choice, _CHOICE_FIELDS):
                received.text += self.text_of(choice)
                received.event = event
                received.finished = received.finished or choice.get("finish_reason") is not None
            case _:
                raise NotContinuable("an event does not have one choice with text")

    def text_of(self, choice: dict[str, Any]) -> str:
        """The text in a choice. Raises NotContinuable if it contains something else."""
        return string(choice.get("text"))

    def join(
        self, event: dict[str, Any], received: DeliveredText, count: Callable[[dict[str, Any]], None]
    ) -> bool:
        head = received.event
        event.update({name: head[name] for name in _HEAD_FIELDS if name in head and name in event})
        if isinstance(usage := event.get("usage"), dict):
            count(usage)
        match event.get("choices"):
            case [{"delta": dict(delta), **choice}] if head:
                delta.pop("role", None)  # the client has received it
                return any(delta.values()) or choice.get("finish_reason") is not None
            case _:
                return True

    def ending(self, received: DeliveredText, usage: Usage | None) -> bytes:
        head = {name: received.event[name] for name in _HEAD_FIELDS if name in received.event}
        events: list[dict[str, Any]] = []
        if not received.finished:
            events.append({"choices": [{"index": 0, **self._empty, "finish_reason": "length"}]})
        if usage is not None:
            counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
            total = usage.prompt_tokens + usage.completion_tokens
            events.append({"choices": [], "usage": counts | {"total_tokens": total}})
        return b"".join(b"data: " + orjson.dumps(head | event) + b"\n\n" for event in events) + DONE


class _Chat(_OpenAIEndpoint):
    path = "/v1/chat/completions"
    operation = "chat"
    _empty: Mapping[str, Any] = {"delta": {}}

    def prompts(self, renderer: PromptRenderer, body: dict[str, Any]) -> list[Prompt]:
        ids = body.get("input_ids")  # an SGLang extension: a prompt that is already tokenized
        if isinstance(ids, list):
            refuse_empty(ids)
        return [renderer.chat(body)]

    def continuable(self, body: Mapping[str, Any]) -> bool:
        match body.get("messages"):
            case [*_, {"role": "assistant", "content": content}]:
                # Without continue_final_message, SGLang makes this message one of the user.
                continued = body.get("continue_final_message") is True and isinstance(content, str)
            case [*_, {}]:
                continued = not body.get("continue_final_message")
            case _:
                continued = False
        chosen = body.get("tool_choice")
        return continued and (chosen is None or chosen in ("auto", "none")) and super().continuable(body)

    def text_of(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta")
        if not isinstance(delta, dict) or not _has_only(delta, _DELTA_FIELDS):
            raise NotContinuable("a delta has something other than content")
        return string(delta.get("content"))

    def rest_request(self, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any] | None:
        rest = dict(body)
        if text:
            messages, begun = body["messages"], ""
            if body.get("continue_final_message"):
                messages, begun = messages[:-1], messages[-1]["content"]
            rest["messages"] = [*messages, {"role": "assistant", "content": begun + text}]
            # vLLM refuses requests that add a generation prompt as well; SGLang ignores the second field.
            rest |= {"continue_final_message": True, "add_generation_prompt": False}
        limits = ("max_tokens", "max_completion_tokens", "min_tokens")
        return rest if limit(rest, text, tokens, *limits) else None


class _Completions(_OpenAIEndpoint):
    path = "/v1/completions"
    operation = "text_completion"

    def prompts(self, renderer: PromptRenderer, body: dict[str, Any]) -> list[Prompt]:
        return text_prompts(renderer, body.get("prompt"))

    def continuable(self, body: Mapping[str, Any]) -> bool:
        return isinstance(body.get("prompt"), str) and super().continuable(body)

    def rest_request(self, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any] | None:
        rest = {"max_tokens": 16, **body}  # the default of SGLang and vLLM
        rest["prompt"] += text
        return rest if limit(rest, text, tokens, "max_tokens", "min_tokens") else None


def _has_only(owner: Mapping[str, Any], known: frozenset[str]) -> bool:
    """Whether no other field than the known ones has a value."""
    return all(name in known or not value for name, value in owner.items())


def read_details(event: bytes) -> tuple[int | None, int | None]:
    """`fetched_tokens` and `verifications` of Usage, as far as the details in the data of a stream event state them."""
    try:
        document = orjson.loads(event)
    except orjson.JSONDecodeError:
        return None, None
    fetched = fetched_tokens(_details(document).get("cached_tokens_details"), None)
    return fetched, _verifications(document)


def without_details(content: bytes, added: Set[str]) -> bytes:
    """An answer or event without the details that only the gateway has asked for with the request fields `added`.

    All other bytes are kept, unless it has several details or other extensions.
    """
    removed = {field for name, field in DETAILS.items() if name in added}
    if DETAILS_MARKER not in content or not removed:
        return content
    alone = _ALONE.search(content)
    if alone is not None and alone[1].decode() in removed:
        return content[: alone.start()] + content[alone.end() :]
    start = max(0, content.find(b"{"))
    try:
        document = orjson.loads(content[start:])
    except orjson.JSONDecodeError:
        return content
    extension = _details(document)
    if not removed & extension.keys():
        return content
    document["sglext"] = {name: value for name, value in extension.items() if name not in removed}
    if not document["sglext"]:
        del document["sglext"]
    return content[:start] + orjson.dumps(document)


def _details(document: Any) -> dict[str, Any]:
    """The fields of `sglext` of a parsed answer or stream event."""
    extension = document.get("sglext") if isinstance(document, dict) else None
    return extension if isinstance(extension, dict) else {}


def _verifications(document: Any) -> int | None:
    """The verifications of drafts, of all samples; None if they are not reported."""
    details = _details(document).get("spec_tokens_details")
    each = details if isinstance(details, list) else [details]
    return total([token_count(one.get("spec_verify_ct")) if isinstance(one, dict) else None for one in each])


CHAT: Final = _Chat()
COMPLETIONS: Final = _Completions()
