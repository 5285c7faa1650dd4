"""When the traffic says that a session was forgotten."""

import pytest

from dps_lab.replay.records import Verdict
from dps_testkit.traffic.judge import Place, forgotten


def verdict(history: str, turn: int, delta: int, length: int = 150) -> Verdict:
    return Verdict(
        pool="greedy",
        reason="over_threshold",
        delta_tokens=delta,
        prompt_tokens=length,
        turn=turn,
        history=history,
        state="redis",
    )


FIRST, THIRD = Place(), Place(turn=2, prompt_tokens=100)

REMEMBERED = {
    "a first turn": (FIRST, verdict("new", 1, 150), False),
    "a turn that has grown": (THIRD, verdict("grown", 3, 50), False),
    "a retry whose first attempt was not committed": (THIRD, verdict("grown", 3, 50), True),
    "a retry whose first attempt was committed": (THIRD, verdict("grown", 3, 0), True),
    "a first turn's retry": (FIRST, verdict("grown", 1, 0), True),
}
FORGOTTEN = {
    "a session begun anew": (THIRD, verdict("new", 1, 150), False),
    "growth from an older turn": (THIRD, verdict("branched", 3, 80), False),
    "a turn that was counted twice": (THIRD, verdict("grown", 4, 50), False),
    "growth that is not what was added": (THIRD, verdict("grown", 3, 51), False),
    "nothing new in a turn that nobody sent before": (THIRD, verdict("grown", 3, 0), False),
    "a retry that begins anew": (THIRD, verdict("new", 1, 150), True),
    "a retry that is one turn further": (THIRD, verdict("grown", 4, 0), True),
    "a server that is no gateway": (THIRD, Verdict(), False),
}


@pytest.mark.parametrize(("before", "told", "repeated"), REMEMBERED.values(), ids=REMEMBERED.keys())
def test_a_session_that_went_on_is_remembered(before: Place, told: Verdict, repeated: bool) -> None:
    assert forgotten(before, told, repeated=repeated) is None


@pytest.mark.parametrize(("before", "told", "repeated"), FORGOTTEN.values(), ids=FORGOTTEN.keys())
def test_anything_else_is_forgotten(before: Place, told: Verdict, repeated: bool) -> None:
    assert forgotten(before, told, repeated=repeated) is not None


def test_it_is_told_in_words() -> None:
    assert forgotten(THIRD, verdict("new", 1, 150), repeated=True) == (
        "new turn 1, ΔL 150 (state: redis), not grown turn 3, ΔL 50 or grown turn 3, ΔL 0"
    )
