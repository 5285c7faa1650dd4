"""The search: splits of the engines, then policies, then thresholds, each first coarsely and then finely.

This module performs no I/O.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dps_gateway.routing.policies import POLICIES
from dps_lab.calibrate.goal import Goal
from dps_lab.calibrate.setup import THRESHOLD_POLICIES, Measurement, Setup
from dps_lab.simulate.trace import SessionTrace

COARSE_THRESHOLDS: Final = 8
"""Number of thresholds with which each split and policy is tried first, at equal shares of the turns."""

COARSE_SPLITS: Final = 9
"""Number of splits that are tried first. Up to eight engines, these are all splits."""

PRUNE: Final = 0.1
"""A split and policy are not refined if their best coarse result exceeds the best of all by this share."""

FINALISTS: Final = 8
"""Number of set-ups that are measured with every seed; the choice is the best of them."""

RESOLUTION: Final = 64
"""A threshold is refined until its neighbours are less than this part of all thresholds away."""

FIXED_POLICIES: Final = tuple(
    name for name in POLICIES if name not in THRESHOLD_POLICIES and name != "Random"
)
"""The policies without a threshold. Random is a control group and is never chosen."""

Measure = Callable[[Setup, int], Measurement]
"""Simulates a set-up with a seed."""


@dataclass(frozen=True)
class Thresholds:
    """For each policy with a threshold, every value of τ that routes the workload's turns differently, ascending.

    The lowest value sends a few turns to the speculative pool; the highest sends all turns but the longest.
    """

    values: Mapping[str, Sequence[int]]
    shares: Mapping[str, Sequence[int]]
    """For each policy, the sorted lengths of all turns, whose quantiles are the coarse thresholds."""

    @classmethod
    def of(cls, sessions: Sequence[SessionTrace]) -> "Thresholds":
        """The thresholds for a workload, by its distributions of ΔL and L."""
        turns = [
            (turn.prompt_tokens, base)
            for session in sessions
            for turn, base in zip(session.turns, session.base_tokens(), strict=True)
        ]
        lengths = {
            "DeltaPrefill": sorted(length - base for length, base in turns),
            "TotalLength": sorted(length for length, _ in turns),
        }
        return cls({policy: sorted({*values})[:-1] for policy, values in lengths.items()}, lengths)

    def coarse(self, policy: str, count: int) -> list[int]:
        """Positions in `values` that divide the turns into `count` parts of about equal size."""
        values, lengths = self.values[policy], self.shares[policy]
        if not values:
            return []
        quantiles = (lengths[len(lengths) * part // count] for part in range(1, count))
        return sorted({min(bisect_left(values, length), len(values) - 1) for length in quantiles})

    def tokens(self, policy: str, position: int) -> int:
        """The roundest τ that routes the workload like the value at this position."""
        values = self.values[policy]
        after = position + 1
        end = values[after] if after < len(values) else self.shares[policy][-1]
        return roundest(values[position], end)


def roundest(low: int, end: int) -> int:
    """The number from `low` to `end` - 1 with the most trailing zeros; the lowest of them."""
    unit: int = 10 ** len(str(end))
    while unit > 1:
        rounded = -(-low // unit) * unit
        if 0 < rounded < end:
            return rounded
        unit //= 10
    return low


class Search:
    """Searches the set-ups of a number of engines, or of one split if `split` is given."""

    def __init__(
        self, measure: Measure, thresholds: Thresholds, goal: Goal, seeds: Sequence[int] = (0, 1, 2)
    ) -> None:
        self._measure = measure
        self._thresholds = thresholds
        self._goal = goal
        self._seeds = seeds
        self._runs: dict[tuple[Setup, int], Measurement] = {}

    @property
    def explored(self) -> dict[Setup, Measurement]:
        """Every set-up that was simulated, with its figures for the first seed."""
        return {setup: figures for (setup, seed), figures in self._runs.items() if seed == self._seeds[0]}

    @property
    def runs(self) -> int:
        """Number of simulations so far."""
        return len(self._runs)

    def run(self, splits: Sequence[int], engines: int) -> dict[Setup, Measurement]:
        """Search and return the finalists with their mean figures over all seeds, best first.

        splits: the permitted numbers of speculative engines out of `engines`.
        """
        branches = self._coarse(splits, engines)
        best = min(map(self._score, self.explored))
        for split, policy in branches:
            family = [s for s in self.explored if s.speculative == split and s.policy == policy]
            excess, value = min(map(self._score, family))
            if excess <= best[0] + PRUNE and value <= best[1] * (1 + PRUNE):
                self._refine(split, engines, policy)
        return self._final(FINALISTS)

    def run_exhaustively(self, splits: Sequence[int], engines: int, count: int) -> dict[Setup, Measurement]:
        """Simulate every split, policy and up to `count` thresholds per policy. Otherwise like `run`."""
        for split in splits:
            for setup in self._fixed(split, engines):
                self._try(setup)
            for policy in self._policies(split, engines):
                for position in self._thresholds.coarse(policy, count + 1):
                    self._try(self._setup(split, engines, policy, position))
        return self._final(FINALISTS)

    def mean(self, setup: Setup) -> Measurement:
        """The figures of a set-up, averaged over all seeds."""
        return Measurement.mean([self._once(setup, seed) for seed in self._seeds])

    def _coarse(self, splits: Sequence[int], engines: int) -> list[tuple[int, str]]:
        """Try every policy coarsely, on every split or on a selection that is halved around the best."""
        branches: list[tuple[int, str]] = []
        tried: set[int] = set()

        def attempt(selected: Iterable[int]) -> None:
            for split in sorted({*selected} - tried):
                tried.add(split)
                for setup in self._fixed(split, engines):
                    self._try(setup)
                for policy in self._policies(split, engines):
                    positions = self._thresholds.coarse(policy, COARSE_THRESHOLDS)
                    if positions:
                        branches.append((split, policy))
                    for position in positions:
                        self._try(self._setup(split, engines, policy, position))

        last = len(splits) - 1
        attempt(splits[round(part * last / (COARSE_SPLITS - 1))] for part in range(COARSE_SPLITS))
        step = -(-last // (COARSE_SPLITS - 1))
        while step > 1:
            step = -(-step // 2)
            centre = splits.index(min(self.explored, key=self._score).speculative)
            attempt(splits[min(max(centre + move, 0), last)] for move in (-step, step))
        return branches

    def _refine(self, split: int, engines: int, policy: str) -> None:
        """Bisect the thresholds around the best one."""
        tried = {
            position: self._score(self._try(self._setup(split, engines, policy, position)))
            for position in self._thresholds.coarse(policy, COARSE_THRESHOLDS)
        }
        last = len(self._thresholds.values[policy]) - 1
        while True:
            best = min(tried, key=tried.__getitem__)
            below = max((position for position in tried if position < best), default=-1)
            above = min((position for position in tried if position > best), default=last + 1)
            middles = {(below + best) // 2, (best + above) // 2} - tried.keys()
            middles = {position for position in middles if 0 <= position <= last}
            if not middles or above - below <= 2 * last // RESOLUTION:
                return
            for position in middles:
                tried[position] = self._score(self._try(self._setup(split, engines, policy, position)))

    def _final(self, count: int) -> dict[Setup, Measurement]:
        """The best set-ups, and the best of each fleet, by their mean figures over all seeds."""
        ordered = sorted(self.explored, key=self._score)
        of_fleet = {setup.fleet: setup for setup in reversed(ordered)}
        finalists = {*ordered[:count], *of_fleet.values()}
        means = {setup: self.mean(setup) for setup in finalists}
        return dict(sorted(means.items(), key=lambda item: (self._goal.score(item[1]), item[0])))

    def _fixed(self, split: int, engines: int) -> list[Setup]:
        """The set-ups of a split whose policy has no threshold."""
        greedy = engines - split
        if not split:
            return [Setup(0, greedy, "AlwaysGreedy")]
        if not greedy:
            return [Setup(split, 0, "AlwaysSpeculative")]
        return [Setup(split, greedy, policy) for policy in FIXED_POLICIES]

    def _policies(self, split: int, engines: int) -> tuple[str, ...]:
        return THRESHOLD_POLICIES if 0 < split < engines else ()

    def _setup(self, split: int, engines: int, policy: str, position: int) -> Setup:
        return Setup(split, engines - split, policy, self._thresholds.tokens(policy, position))

    def _try(self, setup: Setup) -> Setup:
        self._once(setup, self._seeds[0])
        return setup

    def _score(self, setup: Setup) -> tuple[float, float]:
        return self._goal.score(self._once(setup, self._seeds[0]))

    def _once(self, setup: Setup, seed: int) -> Measurement:
        key = setup, seed
        if key not in self._runs:
            self._runs[key] = self._measure(setup, seed)
        return self._runs[key]
