"""The demo's selection of sessions, and its verdict."""

from typing import Any

import pytest

from dps_lab.demo import MAX_ANSWER_TOKENS, choose, parser, verdict
from dps_lab.replay.oracle import Decision
from dps_lab.replay.report import Comparison
from dps_lab.workload.sessions import Session, Turn
from dps_local.emulated_sglang.prompt import Prompts
from tests.lab.turns import answered

TURN = answered()
TRUTH = Decision("speculative", 100, 100, 1)


def sessions(count: int, content: str | None = "ok", **more: Any) -> list[Session]:
    answer = {"role": "assistant", "content": content, **more}
    turn = Turn(messages=[{"role": "user", "content": "?"}], answer=answer)
    return [Session(id=str(number), turns=[turn]) for number in range(count)]


def test_turn_requests_as_many_tokens_as_its_recorded_answer_has(prompts: Prompts) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    texts = ["", "The result of the request.", "word " * 2 * MAX_ANSWER_TOKENS]
    answers = [sessions(1, text) for text in texts] + [sessions(1, None, tool_calls=[call])]
    assert [choose(answer, 1, prompts)[0].turns[0].max_tokens for answer in answers] == [
        1,
        prompts.text_tokens(texts[1]),
        MAX_ANSWER_TOKENS,
        prompts.text_tokens('\n{"name": "add", "arguments": "{}"}'),
    ]


@pytest.mark.parametrize(
    ("comparison", "lost", "fine"),
    [
        (Comparison(7, [], []), 0, True),
        (Comparison(6, [(TURN, TRUTH)], []), 0, True),
        (Comparison(6, [], [(TURN, TRUTH)]), 0, False),
        (Comparison(7, [], []), 1, False),
    ],
)
def test_demo_succeeds_if_nothing_is_lost_and_nothing_differs(
    comparison: Comparison, lost: int, fine: bool
) -> None:
    succeeded, lines = verdict(7, comparison, lost)
    assert succeeded is fine
    assert lines[:2] == [
        f"routing decisions that differ from the offline oracle: {len(comparison.differing)} of 7",
        f"requests lost after client retries: {lost} of 7",
    ]


@pytest.mark.parametrize("value", ["0", "-1"])
def test_number_that_is_not_positive_is_rejected(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a session the demo would wait forever for the turn at which it kills a gateway."""
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["--sessions", value])
    assert caught.value.code == 2
    assert f"--sessions: '{value}' is not a" in capsys.readouterr().err
