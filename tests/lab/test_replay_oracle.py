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
