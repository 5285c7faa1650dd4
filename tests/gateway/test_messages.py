"""Requests of Anthropic's Messages API are converted to chat requests as SGLang converts them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dps_gateway.prompt.chat import ChatInput, chat_input
from dps_gateway.prompt.messages import chat_request, renders_inline_system

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "messages_sglang_0_5_23.json").read_text())

CONVERTED_THOUGH_REFUSED = ("number as text", "unknown role")
"""Requests that SGLang's request models refuse. Their length does not matter, because the refusal is relayed."""

INLINE = "{% for m in messages %}{{ m.content }}{% endfor %}"
FIRST_ONLY = (
    "{{ messages[0].content }}{% for m in messages[1:] if m.role != 'system' %}{{ m.content }}{% endfor %}"
)
STRICT = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('no') }}{% endfor %}" + INLINE


def converted(case: dict[str, Any]) -> ChatInput | None:
    """The chat template's input according to the gateway, or None if it refuses the request."""
    try:
        chat = chat_request(case["body"], inline_system=case["inline_system"], reasoning=case["reasoning"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return chat_input(chat, "openai")


def recorded(case: dict[str, Any], *, both_variables: bool = True) -> ChatInput | None:
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


@pytest.mark.parametrize(
    "case",
    [case for case in RECORDED if case["name"] not in CONVERTED_THOUGH_REFUSED],
    ids=lambda case: f"{case['name']}, inline system {case['inline_system']}, reasoning {case['reasoning']}",
)
def test_conversion_equals_that_of_sglang(case: dict[str, Any]) -> None:
    assert converted(case) == recorded(case)


@pytest.mark.parametrize(
    ("template", "inline"),
    [(INLINE, True), (FIRST_ONLY, False), (STRICT, False), ("{% for %}", False), ("", False)],
    ids=["renders them", "drops them", "refuses them", "invalid", "no template"],
)
def test_system_messages_are_merged_unless_the_template_renders_them(template: str, inline: bool) -> None:
    assert renders_inline_system(template) is inline
