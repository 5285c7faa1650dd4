"""When a replica moves between two pools that share a number of GPUs: the rule of the operator and of simulations."""

from collections.abc import Mapping
from typing import Final

from dps_engines.pools import POOLS, PoolName

HYSTERESIS: Final = 1.25
"""A replica moves only if the load per replica of its new pool exceeds this multiple of the load that it leaves
behind."""
MIN_LOAD: Final = 1.0
"""A replica moves only to a pool with at least this number of requests per replica."""
HALF_LIVES_PER_COOLDOWN: Final = 4
"""The half-life of the demand's moving average is this part of the minimum time between two moves."""

Counts = Mapping[PoolName, int]
"""Replicas of each pool."""
Demand = Mapping[PoolName, float]
"""Requests in flight and waiting of each pool, averaged over time."""


def pool_to_grow(counts: Counts, demand: Demand, load_ratio: float = 1.0) -> PoolName | None:
    """The pool that should receive a replica of the other one; None if none should move.

    A move lowers the higher load per replica, and each pool keeps a replica. At constant demand, no move is undone.
    load_ratio: how many times the load of a greedy replica a speculative one should have; `dps calibrate` finds it.
    """
    weights: dict[PoolName, float] = {"speculative": load_ratio, "greedy": 1.0}
    for pool, donor in (POOLS, POOLS[::-1]):
        if counts[donor] < 2:
            continue
        load = demand[pool] / counts[pool]
        relieved = load / weights[pool]
        left_behind = demand[donor] / (counts[donor] - 1) / weights[donor]
        if load >= MIN_LOAD and relieved > HYSTERESIS * left_behind:
            return pool
    return None


def averaged(mean: Demand, sample: Demand, seconds: float, cooldown_seconds: float) -> dict[PoolName, float]:
    """The exponential moving average of the demand with a sample that is `seconds` newer."""
    half_life = cooldown_seconds / HALF_LIVES_PER_COOLDOWN
    weight = 1 - 2 ** (-seconds / half_life)
    return {pool: mean[pool] + weight * (sample[pool] - mean[pool]) for pool in POOLS}
