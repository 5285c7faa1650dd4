"""record_conversions.py: record how SGLang converts requests of other APIs to chat requests (JSON).

    PYTHONPATH=. e2e/real_sglang/sglang-python -m e2e.real_sglang.record_conversions

Runs SGLang's own conversions of the Messages and Responses APIs, without a server: for a chat template with and without
system messages after the first message and, for messages, for an engine with and without a reasoning parser. The
tokenizer's template decides the former, and `record_prompts.py` records the resulting lengths for one template.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any, NoReturn

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.reasoning_parser import ReasoningParser

from e2e.real_sglang.prompts import recorded_bodies, write

PARSER = "qwen3"
RECORDED = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
Convert = Callable[[dict[str, Any]], ChatCompletionRequest]
"""Converts a request. Raises ValueError if SGLang refuses it."""


class Chat(SimpleNamespace):
    """The part of SGLang's chat handler that the conversion of messages uses."""

    supports_native_reasoning_history = OpenAIServingChat.supports_native_reasoning_history
    wrap_reasoning_history = OpenAIServingChat.wrap_reasoning_history
    apply_reasoning_enabled = OpenAIServingChat.apply_reasoning_enabled
    _reasoning_default_mode = OpenAIServingChat._reasoning_default_mode
    _get_reasoning_toggle_param = OpenAIServingChat._get_reasoning_toggle_param


def messages(*, inline_system: bool, reasoning: bool) -> Convert:
    """SGLang's conversion in /v1/messages for a template and a command line with these properties."""
    serving = AnthropicServing(
        Chat(
            supports_inline_system=inline_system,
            chat_encoding_spec=None,
            reasoning_parser=PARSER if reasoning else None,
            _reasoning_detector=ReasoningParser(PARSER).detector if reasoning else None,
            template_manager=SimpleNamespace(reasoning_config=None, chat_template_name=None),
        )
    )
    return lambda body: serving._convert_to_chat_completion_request(AnthropicMessagesRequest(**body))


class Converted(BaseException):
    """Carries the chat request out of the handler, which would render it next."""

    def __init__(self, chat: ChatCompletionRequest) -> None:
        self.chat = chat


class Handler(OpenAIServingResponses):  # type: ignore[misc]  # mypy does not see SGLang
    """The part of SGLang's handler of /v1/responses that converts requests."""

    def __init__(self, *, inline_system: bool) -> None:
        self.supports_inline_system = inline_system
        self.tool_call_parser = self.tool_server = None
        self.use_harmony = self._translates_tools = self.enable_response_store = self.is_disaggregated = False
        self.tokenizer_manager = type("Manager", (), {"tokenizer": None, "model_config": self})()
        self.is_multimodal = True

    def _validate_model(self, model: str | None) -> None:
        return None

    def _validate_media_content(self, request: ChatCompletionRequest) -> None:
        return None

    def _process_messages(self, request: ChatCompletionRequest, *_: Any, **__: Any) -> NoReturn:
        raise Converted(request)

    def convert(self, body: dict[str, Any]) -> ChatCompletionRequest:
        """The chat request that SGLang would render."""
        try:
            asyncio.run(self.create_responses(ResponsesRequest(**body)))
        except Converted as done:
            return done.chat
        raise ValueError("SGLang refuses the request")


def converted(convert: Convert, body: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of the chat request that affect the prompt, or None if SGLang refuses the request."""
    try:
        chat = convert(json.loads(json.dumps(body)))
    except ValueError:
        return None
    # As the chat handler passes them to the template: messages without fields that are null, and complete tools.
    dumped = chat.model_dump() | {
        "messages": [message.model_dump(exclude_none=True) for message in chat.messages]
    }
    return {name: dumped[name] for name in RECORDED if dumped[name] is not None}


def record(kind: str, conversions: Iterable[tuple[dict[str, bool], Convert]]) -> None:
    """Record all requests for the first conversion, and for the others only what they convert differently."""
    entries: list[dict[str, Any]] = []
    usual: dict[str, Any] = {}
    for properties, convert in conversions:
        for name, body in recorded_bodies(kind).items():
            chat = converted(convert, body)
            if name not in usual or usual[name] != chat:
                usual.setdefault(name, chat)
                entries.append({"name": name, **properties, "body": body, "chat": chat})
    write(kind, entries)


if __name__ == "__main__":
    both = (False, True)
    engines = [{"inline_system": system, "reasoning": reasons} for system, reasons in product(both, both)]
    record("messages", [(engine, messages(**engine)) for engine in engines])
    record(
        "responses", [({"inline_system": system}, Handler(inline_system=system).convert) for system in both]
    )
