"""When sessions arrive in an open loop: at a constant rate, in bursts, or over a day. This module performs no I/O."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, Literal

Pattern = Literal["poisson", "bursts", "daily"]
PATTERNS: Final[tuple[Pattern, ...]] = ("poisson", "bursts", "daily")

BURST_SECONDS: Final = 10.0
BURST_PERIOD_SECONDS: Final = 60.0
BURST_FACTOR: Final = 4.0
"""During the first BURST_SECONDS of every BURST_PERIOD_SECONDS, the rate is BURST_FACTOR times the mean."""

DAILY_SWING: Final = 0.8
"""Over a day, the rate varies from 1 - DAILY_SWING to 1 + DAILY_SWING times the mean."""


def arrival_times(pattern: Pattern, rate: float, count: int, rng: random.Random) -> Iterator[float]:
    """`count` arrival times in seconds, ascending, with a mean of `rate` per second.

    The gaps of `poisson` are exponential. The others are inhomogeneous Poisson processes. For `daily`, the day is as
    long as `count` sessions take to arrive at the mean rate, and begins and ends with the lowest rate.
    """
    if pattern == "poisson":
        return _constant(rate, count, rng)
    if pattern == "bursts":
        return _thinned(lambda now: rate * _burst_factor(now), rate * BURST_FACTOR, count, rng)
    day = count / rate
    return _thinned(
        lambda now: rate * (1 - DAILY_SWING * math.cos(2 * math.pi * now / day)),
        rate * (1 + DAILY_SWING),
        count,
        rng,
    )


def _constant(rate: float, count: int, rng: random.Random) -> Iterator[float]:
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        yield now


def _burst_factor(now: float) -> float:
    if now % BURST_PERIOD_SECONDS < BURST_SECONDS:
        return BURST_FACTOR
    return (BURST_PERIOD_SECONDS - BURST_FACTOR * BURST_SECONDS) / (BURST_PERIOD_SECONDS - BURST_SECONDS)


def _thinned(
    rate_at: Callable[[float], float], highest: float, count: int, rng: random.Random
) -> Iterator[float]:
    """Arrivals at a rate that changes over time, by thinning: a part of the arrivals at the highest rate is kept."""

    def kept() -> Iterator[float]:
        now = 0.0
        while True:
            now += rng.expovariate(highest)
            if rng.random() * highest < rate_at(now):
                yield now

    return islice(kept(), count)
