"""Requests of the Messages API and the Responses API are converted to chat requests as SGLang converts them."""

import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from dps_gateway.prompt.chat import ChatInput, chat_input
from dps_gateway.prompt.messages import chat_request, renders_inline_system
from dps_gateway.prompt.renderer import PromptRenderer, Uncountable
from dps_gateway.prompt.responses import chat_request as chat_request_of_responses
from dps_testkit.tokenizers import shared_tokenizer

CONVERTED_THOUGH_REFUSED = ("number as text", "unknown role", "unknown tool")
"""Requests that SGLang's request models refuse. Their length does not matter, because the refusal is relayed."""


def recordings(api: str) -> list[tuple[str, dict[str, Any]]]:
    """The recorded conversions of an API, with its name, except for requests that are CONVERTED_THOUGH_REFUSED."""
    text = (Path(__file__).parent / "fixtures" / f"{api}_sglang_0_5_23.json").read_text()
    return [(api, case) for case in json.loads(text) if case["name"] not in CONVERTED_THOUGH_REFUSED]


INLINE = "{% for m in messages %}{{ m.content }}{% endfor %}"
FIRST_ONLY = (
    "{{ messages[0].content }}{% for m in messages[1:] if m.role != 'system' %}{{ m.content }}{% endfor %}"
)
STRICT = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('no') }}{% endfor %}" + INLINE


def converted(api: str, case: dict[str, Any]) -> ChatInput | None:
    """The chat template's input according to the gateway, or None if it refuses the request."""
    body, inline = case["body"], case["inline_system"]
    try:
        if api == "messages":
            chat = chat_request(body, inline_system=inline, reasoning=case["reasoning"])
        else:
            chat = chat_request_of_responses(body, inline_system=inline)
        return chat_input(chat, "openai")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def recorded(case: dict[str, Any], *, both_variables: bool) -> ChatInput | None:
    """The chat template's input for SGLang's chat request, or None if SGLang refused the request.

    both_variables: whether the gateway sets both variables for thinking, where SGLang sets one of them.
    """
    chat = case["chat"]
    if chat is None:
        return None
    variables = dict(chat.get("chat_template_kwargs") or {})
    if both_variables and "enable_thinking" in variables:
        variables["thinking"] = variables["enable_thinking"]
    if "reasoning_effort" in chat:
        variables["reasoning_effort"] = chat["reasoning_effort"]
    messages = [
        message | {"content": without_defaults(message.get("content"))} for message in chat["messages"]
    ]
    fields = {"messages": messages, "chat_template_kwargs": variables, "reasoning_effort": None}
    return chat_input(chat | fields, "openai")


def without_defaults(content: Any) -> Any:
    """Message content without the image options that SGLang's models add."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"]["url"]}} if "image_url" in part else part
        for part in content
    ]


@pytest.mark.parametrize(("api", "case"), [*recordings("messages"), *recordings("responses")])
def test_conversion_equals_that_of_sglang(api: str, case: dict[str, Any]) -> None:
    assert converted(api, case) == recorded(case, both_variables=api == "messages"), case["name"]


@pytest.mark.parametrize(
    ("template", "inline"),
    [(INLINE, True), (FIRST_ONLY, False), (STRICT, False), ("{% for %}", False), ("", False)],
    ids=["renders them", "drops them", "refuses them", "invalid", "no template"],
)
def test_system_messages_are_merged_unless_the_template_renders_them(template: str, inline: bool) -> None:
    assert renders_inline_system(template) is inline


def test_requests_to_models_with_the_harmony_format_are_not_converted() -> None:
    """SGLang does not use the chat template for them. The gateway then serves the request as stateless."""
    harmony = copy(shared_tokenizer())
    harmony.chat_template = "{{ '<|channel|>' }}"
    with pytest.raises(Uncountable, match="harmony"):
        PromptRenderer(harmony).responses({"input": "hello"})
