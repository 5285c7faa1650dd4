"""The rule of a GPU budget that `dps calibrate` finds."""

from dataclasses import replace

import pytest

from dps_lab.calibrate.budget import Rule, choose
from dps_lab.calibrate.goal import Goal
from dps_lab.calibrate.setup import Measurement

EQUAL = Measurement(
    session_median=10.0,
    session_p95=20.0,
    batch=10.0,
    ttft_median=0.1,
    ttft_p95=0.5,
    tpot_median=0.01,
    speculative_share=0.5,
)
LIMIT = Goal(limits=(("ttft-p95", 0.6),))
OTHER: dict[str, tuple[Measurement, Goal, Rule]] = {
    "better": (replace(EQUAL, session_median=7.5), Goal(), Rule(2.0, 0.25)),
    "hardly better": (replace(EQUAL, session_median=9.9), Goal(), Rule(1.0, 0.0)),
    "worse": (replace(EQUAL, session_median=11.0), Goal(), Rule(1.0, 0.0)),
    "better, but beyond a limit": (
        replace(EQUAL, session_median=8.0, ttft_p95=0.7),
        LIMIT,
        Rule(1.0, 0.0),
    ),
}


@pytest.mark.parametrize(("other", "goal", "expected"), OTHER.values(), ids=OTHER.keys())
def test_equal_loads_are_kept_unless_another_rule_is_better(
    other: Measurement, goal: Goal, expected: Rule
) -> None:
    assert choose({1.0: EQUAL, 2.0: other}, goal) == expected


def test_rule_that_meets_the_limits_is_preferred() -> None:
    slow = replace(EQUAL, ttft_p95=0.7)
    assert choose({1.0: slow, 2.0: replace(EQUAL, session_median=11.0)}, LIMIT).load_ratio == 2.0
