"""The decisions that the load generator reports as lost session state."""

import pytest

from dps_lab.replay.records import Verdict
from dps_testkit.traffic.session_state import LastTurn, lost_state


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


FIRST, THIRD = LastTurn(), LastTurn(turn=2, prompt_tokens=100)

CONTINUED = {
    "a first turn": (FIRST, verdict("new", 1, 150), False),
    "a turn that has grown": (THIRD, verdict("grown", 3, 50), False),
    "a retry whose first attempt was not committed": (THIRD, verdict("grown", 3, 50), True),
    "a retry whose first attempt was committed": (THIRD, verdict("grown", 3, 0), True),
    "a first turn's retry": (FIRST, verdict("grown", 1, 0), True),
}
LOST = {
    "a new session": (THIRD, verdict("new", 1, 150), False),
    "growth from an older turn": (THIRD, verdict("branched", 3, 80), False),
    "a turn that was counted twice": (THIRD, verdict("grown", 4, 50), False),
    "a delta that differs from the added length": (THIRD, verdict("grown", 3, 51), False),
    "zero delta in a turn that is not a retry": (THIRD, verdict("grown", 3, 0), False),
    "a retry that starts a new session": (THIRD, verdict("new", 1, 150), True),
    "a retry that is one turn further": (THIRD, verdict("grown", 4, 0), True),
    "a server that is not a gateway": (THIRD, Verdict(), False),
}


@pytest.mark.parametrize(("before", "decision", "repeated"), CONTINUED.values(), ids=CONTINUED.keys())
def test_continued_session_is_not_reported(before: LastTurn, decision: Verdict, repeated: bool) -> None:
    assert lost_state(before, decision, repeated=repeated) is None


@pytest.mark.parametrize(("before", "decision", "repeated"), LOST.values(), ids=LOST.keys())
def test_any_other_decision_is_reported(before: LastTurn, decision: Verdict, repeated: bool) -> None:
    assert lost_state(before, decision, repeated=repeated) is not None


def test_report_names_actual_and_accepted_decisions() -> None:
    assert lost_state(THIRD, verdict("new", 1, 150), repeated=True) == (
        "new turn 1, ΔL 150 (state: redis), not grown turn 3, ΔL 50 or grown turn 3, ΔL 0"
    )
