"""The demo's selection of sessions, and its verdict."""

import pytest

from dps_lab.demo import MAX_ANSWER_TOKENS, choose, parser, verdict
from dps_lab.replay.oracle import Decision, PromptCounter
from dps_lab.replay.report import Comparison
from dps_lab.workload.sessions import Session, Turn
from dps_local.assets import bundled_tokenizer
from tests.lab.turns import answered

TURN = answered()
TRUTH = Decision("speculative", 100, 100, 1)


def sessions(count: int, answer: str = "ok") -> list[Session]:
    turn = Turn(messages=[{"role": "user", "content": "?"}], answer={"role": "assistant", "content": answer})
    return [Session(id=str(number), turns=[turn]) for number in range(count)]


def test_turn_requests_as_many_tokens_as_its_recorded_answer_has() -> None:
    counter = PromptCounter(bundled_tokenizer())
    answers = ["The result of the request.", "word " * 2 * MAX_ANSWER_TOKENS]
    assert [
        turn.max_tokens for text in answers for turn in choose(sessions(1, text), 1, counter)[0].turns
    ] == [counter.text_tokens(answers[0]), MAX_ANSWER_TOKENS]


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
