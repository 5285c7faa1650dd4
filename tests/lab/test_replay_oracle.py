"""The oracle: Eq. 1 and 2 of the paper, applied to recorded sessions."""

import math
from typing import Any

import pytest

from dps_lab.replay.oracle import Decision, delta_prefill_pool, expected_by_session
from dps_lab.workload.sessions import Session, Turn
from dps_local.emulated_sglang.prompt import Prompts


@pytest.mark.parametrize(
    ("delta", "threshold", "pool"),
    [
        (1, 0, "greedy"),
        (0, 0, "speculative"),
        (127, 128, "speculative"),
        (128, 128, "speculative"),
        (129, 128, "greedy"),
        (10**9, math.inf, "speculative"),
    ],
)
def test_turn_is_routed_to_the_speculative_pool_up_to_the_threshold(
    delta: int, threshold: float, pool: str
) -> None:
    assert delta_prefill_pool(delta, threshold) == pool


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_delta_is_the_growth_since_the_previous_turn(prompts: Prompts) -> None:
    answer = {"role": "assistant", "content": "hi"}
    session = Session(
        id="a",
        turns=[Turn(messages=[user("hello")], answer=answer), Turn(messages=[user("more")], answer=answer)],
    )
    first = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    second = "<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    begin = prompts.text_tokens("<|im_start|>assistant\n")
    length = prompts.text_tokens(first) + begin
    growth = prompts.text_tokens(second)
    assert expected_by_session([session], prompts, threshold_tokens=length - 1) == {
        "a": [Decision("greedy", length, length, 1), Decision("speculative", growth, length + growth, 2)]
    }


def test_messages_and_tools_are_counted_as_the_engine_renders_them(prompts: Prompts) -> None:
    """Null content becomes empty, arguments become objects, and tools have exactly SGLang's fields."""
    tool = {"type": "function", "function": {"name": "add", "strict": None, "x": 1}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    rendered = (
        "<|im_start|>system\nBe brief.\n\n"
        "You may call these functions, one JSON document a line:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": null, "parameters": null}, '
        '"defer_loading": null}\n</tools>\n'
        'Write a call as <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1 + 1?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        user("1 + 1?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    assert prompts.prompt_tokens(messages, [tool]) == prompts.text_tokens(rendered)
