"""Arrivals of an open loop: constant, in bursts, and over a day."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_lab.simulate.arrivals import (
    BURST_PERIOD_SECONDS,
    BURST_SECONDS,
    PATTERNS,
    Pattern,
    arrival_times,
)


def times(pattern: Pattern, rate: float, count: int, seed: int = 0) -> list[float]:
    return list(arrival_times(pattern, rate, count, random.Random(seed)))


@given(st.sampled_from(PATTERNS), st.floats(0.01, 100), st.integers(1, 200), st.integers())
def test_arrivals_are_ascending_and_as_many_as_requested(
    pattern: Pattern, rate: float, count: int, seed: int
) -> None:
    arrivals = times(pattern, rate, count, seed)
    assert len(arrivals) == count
    assert all(earlier <= later for earlier, later in pairwise([0.0, *arrivals]))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_mean_rate_is_the_requested_one(pattern: Pattern) -> None:
    assert 20_000 / times(pattern, 5.0, 20_000)[-1] == pytest.approx(5.0, rel=0.05)


def test_two_thirds_of_the_sessions_arrive_in_bursts() -> None:
    arrivals = times("bursts", 5.0, 20_000)
    inside = sum(time % BURST_PERIOD_SECONDS < BURST_SECONDS for time in arrivals)
    assert inside / len(arrivals) == pytest.approx(2 / 3, abs=0.02)


def test_most_sessions_of_a_day_arrive_around_noon() -> None:
    day = 20_000 / 5.0
    arrivals = times("daily", 5.0, 20_000)
    around_noon = sum(day / 4 <= time < day * 3 / 4 for time in arrivals)
    assert around_noon / len(arrivals) == pytest.approx(0.5 + 0.8 / 3.14159, abs=0.02)
