"""record_messages.py OUT: record how SGLang converts requests of Anthropic's Messages API to chat requests (JSON).

    PYTHONPATH=. e2e/real_sglang/sglang-python -m e2e.real_sglang.record_messages \
        tests/gateway/fixtures/messages_sglang_0_5_23.json

Runs SGLang's own conversion, without a server: for a chat template with and without system messages after the first
message, and for an engine with and without a reasoning parser. The tokenizer's template decides the former, and
`record_prompts.py` records the resulting prompt lengths for one template.
"""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.reasoning_parser import ReasoningParser

from e2e.real_sglang.messages import message_bodies
from e2e.real_sglang.prompts import MODEL

PARSER = "qwen3"
RECORDED = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")


class Chat(SimpleNamespace):
    """The part of SGLang's chat handler that the conversion uses."""

    supports_native_reasoning_history = OpenAIServingChat.supports_native_reasoning_history
    wrap_reasoning_history = OpenAIServingChat.wrap_reasoning_history
    apply_reasoning_enabled = OpenAIServingChat.apply_reasoning_enabled
    _reasoning_default_mode = OpenAIServingChat._reasoning_default_mode
    _get_reasoning_toggle_param = OpenAIServingChat._get_reasoning_toggle_param


def handler(*, inline_system: bool, reasoning: bool) -> AnthropicServing:
    """SGLang's handler of /v1/messages for a template and a command line with these properties."""
    return AnthropicServing(
        Chat(
            supports_inline_system=inline_system,
            chat_encoding_spec=None,
            reasoning_parser=PARSER if reasoning else None,
            _reasoning_detector=ReasoningParser(PARSER).detector if reasoning else None,
            template_manager=SimpleNamespace(reasoning_config=None, chat_template_name=None),
        )
    )


def converted(serving: AnthropicServing, body: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of the chat request that affect the prompt, or None if SGLang refuses the request."""
    try:
        request = AnthropicMessagesRequest(**json.loads(json.dumps(body)))
        chat = serving._convert_to_chat_completion_request(request)
    except ValueError:
        return None
    # As the chat handler passes them to the template: messages without fields that are null, and complete tools.
    messages = [message.model_dump(exclude_none=True) for message in chat.messages]
    dumped = chat.model_dump() | {"messages": messages}
    return {name: dumped[name] for name in RECORDED if dumped[name] is not None}


def main(out: Path) -> None:
    """Record into `out`, one request per line: all for the first handler, for the others only what they convert
    differently.
    """
    lines: list[str] = []
    usual: dict[str, Any] = {}
    for inline_system, reasoning in product((False, True), repeat=2):
        serving = handler(inline_system=inline_system, reasoning=reasoning)
        for name, fields in message_bodies():
            body = {"model": MODEL, "max_tokens": 1} | fields
            chat = converted(serving, body)
            if name in usual and usual[name] == chat:
                continue
            usual.setdefault(name, chat)
            case = {
                "name": name,
                "inline_system": inline_system,
                "reasoning": reasoning,
                "body": body,
                "chat": chat,
            }
            lines.append(json.dumps(case))
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
