"""The demo's selection of sessions, and its verdict."""

import pytest

from dps_lab.demo import MAX_ANSWER_TOKENS, choose, parser, verdict
from dps_lab.replay.oracle import Decision, PromptCounter
from dps_lab.replay.records import TurnRecord, Usage, Verdict
from dps_lab.replay.report import Comparison
from dps_lab.workload.sessions import Session, Turn
from dps_local.assets import bundled_tokenizer

SEEN = Verdict("greedy", "over_threshold", 100, 100, 1, "new", "redis")
TURN = TurnRecord(
    session="s",
    turn=1,
    url="http://a/v1",
    status=200,
    verdict=SEEN,
    attempts=1,
    unacknowledged=0,
    started=0.0,
    ttft=0.1,
    latency=0.2,
    usage=Usage(),
)
TRUTH = Decision("speculative", 100, 100, 1)


def sessions(count: int, answer: str = "ok") -> list[Session]:
    turn = Turn(messages=[{"role": "user", "content": "?"}], answer={"role": "assistant", "content": answer})
    return [Session(id=str(number), turns=[turn]) for number in range(count)]


@pytest.mark.parametrize(
    ("available", "count", "chosen"),
    [(10, 5, "0 2 4 6 8"), (10, 3, "0 3 6"), (3, 3, "0 1 2"), (2, 80, "0 1")],
)
def test_selected_sessions_are_evenly_spread(available: int, count: int, chosen: str) -> None:
    counter = PromptCounter(bundled_tokenizer())
    assert [session.id for session in choose(sessions(available), count, counter)] == chosen.split()


def test_turn_requests_as_many_tokens_as_its_recorded_answer_has() -> None:
    counter = PromptCounter(bundled_tokenizer())
    answers = ["The result of the request.", "word " * 2 * MAX_ANSWER_TOKENS]
    assert [
        turn.max_tokens for text in answers for turn in choose(sessions(1, text), 1, counter)[0].turns
    ] == [counter.text_tokens(answers[0]), MAX_ANSWER_TOKENS]


def test_demo_succeeds_if_nothing_is_lost_and_nothing_differs() -> None:
    assert verdict(7, Comparison(7, [], []), lost=0) == (
        True,
        [
            "routing decisions that differ from the offline oracle: 0 of 7",
            "requests lost after client retries: 0 of 7",
        ],
    )


@pytest.mark.parametrize(
    ("comparison", "lost", "fine"),
    [
        (Comparison(6, [(TURN, TRUTH)], []), 0, True),
        (Comparison(6, [], [(TURN, TRUTH)]), 0, False),
        (Comparison(7, [], []), 1, False),
    ],
)
def test_loss_or_difference_fails_the_demo(comparison: Comparison, lost: int, fine: bool) -> None:
    assert verdict(7, comparison, lost)[0] is fine


@pytest.mark.parametrize("option", ["--sessions", "--speed"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_number_that_is_not_positive_is_rejected(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a session the demo would wait forever for the turn at which it kills a gateway."""
    with pytest.raises(SystemExit) as caught:
        parser().parse_args([option, value])
    assert caught.value.code == 2
    assert f"{option}: '{value}' is not a" in capsys.readouterr().err
