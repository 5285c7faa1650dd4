"""The rule by which replicas move between two pools that share a GPU budget, found by simulation.

This module performs no I/O.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dps_lab.calibrate.goal import Goal
from dps_lab.calibrate.result import FLAT
from dps_lab.calibrate.setup import Conditions, Measurement, Setup
from dps_lab.simulate.fleet import Budget

LOAD_RATIOS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The rules that are compared, see `dps_engines.gpu_budget.receiver`. 1 keeps the loads equal."""


@dataclass(frozen=True)
class Rule:
    """The rule that was found. `gain` is the relative decrease of the objective from that with equal loads."""

    load_ratio: float
    gain: float


def find_rule(
    conditions: Conditions, setup: Setup, cooldown_seconds: float, goal: Goal, seeds: Sequence[int]
) -> Rule:
    """The best rule for a policy, beginning with the split of a set-up. A gain of less than FLAT does not count."""
    return choose(
        {
            ratio: _mean(conditions, setup, Budget(cooldown_seconds, load_ratio=ratio), seeds)
            for ratio in LOAD_RATIOS
        },
        goal,
    )


def choose(figures: Mapping[float, Measurement], goal: Goal) -> Rule:
    """The best of several load ratios, which contain 1."""
    equal = goal.value(figures[1.0])
    best = min(figures, key=lambda ratio: goal.score(figures[ratio]))
    gain = 1 - goal.value(figures[best]) / equal
    excess = max(0.0, goal.excess(figures[1.0]))
    if gain < FLAT and excess <= max(0.0, goal.excess(figures[best])):
        return Rule(1.0, 0.0)
    return Rule(best, gain)


def _mean(conditions: Conditions, setup: Setup, budget: Budget, seeds: Sequence[int]) -> Measurement:
    moving = replace(conditions, fleet=replace(conditions.fleet, budget=budget))
    return Measurement.mean([moving.measure(setup, seed) for seed in seeds])
