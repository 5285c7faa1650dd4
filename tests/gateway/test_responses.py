"""Requests of OpenAI's Responses API are converted to chat requests as SGLang converts them."""

import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from dps_gateway.prompt.chat import ChatInput, chat_input
from dps_gateway.prompt.renderer import PromptRenderer, Uncountable
from dps_gateway.prompt.responses import chat_request
from dps_testkit.tokenizers import shared_tokenizer
from tests.gateway.test_messages import recorded

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "responses_sglang_0_5_23.json").read_text())

CONVERTED_THOUGH_REFUSED = ("unknown tool",)
"""Requests that SGLang's request models refuse. Their length does not matter, because the refusal is relayed."""


def converted(case: dict[str, Any]) -> ChatInput | None:
    """The chat template's input according to the gateway, or None if it refuses the request."""
    try:
        return chat_input(chat_request(case["body"], inline_system=case["inline_system"]), "openai")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


@pytest.mark.parametrize(
    "case",
    [case for case in RECORDED if case["name"] not in CONVERTED_THOUGH_REFUSED],
    ids=lambda case: f"{case['name']}, inline system {case['inline_system']}",
)
def test_conversion_equals_that_of_sglang(case: dict[str, Any]) -> None:
    assert converted(case) == recorded(case, both_variables=False)


def test_requests_to_models_with_the_harmony_format_are_not_converted() -> None:
    """SGLang does not use the chat template for them. The gateway then serves the request as stateless."""
    harmony = copy(shared_tokenizer())
    harmony.chat_template = "{{ '<|channel|>' }}"
    with pytest.raises(Uncountable, match="harmony"):
        PromptRenderer(harmony).responses({"input": "hello"})
