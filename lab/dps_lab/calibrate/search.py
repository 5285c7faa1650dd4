"""The set-ups that a calibration simulates, and the figure by which it chooses one. This module performs no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import POLICIES, policy_named
from dps_lab.simulate.report import Report, mean_of, report_of
from dps_lab.simulate.run import Scenario
from dps_lab.simulate.trace import SessionTrace

THRESHOLD_POLICIES: Final = ("DeltaPrefill", "TotalLength")
"""The policies that compare a length with τ."""

OTHER_POLICIES: Final = tuple(name for name in POLICIES if name not in (*THRESHOLD_POLICIES, "Random"))
"""The other policies. Random is a control group and is never chosen."""

THRESHOLDS: Final = 15
"""How many values of τ are tried: those that divide the workload's turns into 16 parts of about equal size."""

FINALISTS: Final = 8
"""Number of set-ups that are simulated with every seed; the choice is the best of them."""

SEEDS: Final = (0, 1, 2)

FLAT: Final = 0.02
"""Results that differ by less than this share count as equal."""

LOAD_RATIOS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The rules of a GPU budget that are compared, see `dps_engines.gpu_budget.pool_to_grow`. 1 keeps the loads equal."""


@dataclass(frozen=True, order=True)
class Setup:
    """A fleet and a policy. `threshold_tokens` is None for policies without a threshold."""

    speculative: int
    greedy: int
    policy: str
    threshold_tokens: int | None = None

    @property
    def two_pools(self) -> bool:
        """Whether the fleet has engines of both kinds."""
        return self.speculative > 0 and self.greedy > 0

    @property
    def fleet(self) -> str:
        """The fleet as `dps simulate --fleet` accepts it."""
        return f"speculative={self.speculative},greedy={self.greedy}"

    def __str__(self) -> str:
        threshold = "" if self.threshold_tokens is None else f", τ = {self.threshold_tokens:,}"
        return f"{self.fleet}, {self.policy}{threshold}"


OBJECTIVES: Final[Mapping[str, tuple[Callable[[Report], float], str]]] = {
    "session": (lambda report: report.session_seconds.median, "median session latency"),
    "session-p95": (lambda report: report.session_seconds.p95, "95th percentile of the session latency"),
    "batch": (lambda report: report.batch_seconds, "time for all sessions"),
    "ttft": (lambda report: report.time_to_first_token_seconds.median, "median time to first token"),
    "ttft-p95": (
        lambda report: report.time_to_first_token_seconds.p95,
        "95th percentile of the time to first token",
    ),
    "tpot": (lambda report: report.time_per_token_seconds, "median time per output token"),
}
"""The figures that can be minimised, in seconds, and what they are."""


@dataclass(frozen=True)
class Goal:
    """The objective, and limits by the name of the figure, in seconds."""

    objective: str = "session"
    limits: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """What is minimised."""
        return OBJECTIVES[self.objective][1]

    def value(self, figures: Report) -> float:
        """The figure to minimise, in seconds."""
        return OBJECTIVES[self.objective][0](figures)

    def excess(self, figures: Report) -> float:
        """The largest relative amount by which a limit is exceeded; 0 if all limits are met."""
        return max((0.0, *(OBJECTIVES[name][0](figures) / limit - 1 for name, limit in self.limits)))

    def score(self, figures: Report) -> tuple[float, float]:
        """The order of preference, smallest first: excess over the limits, then the objective."""
        return self.excess(figures), self.value(figures)


Measure = Callable[[Setup, int], Report]
"""Simulates a set-up with a seed."""


def measure(sessions: Sequence[SessionTrace], base: Scenario, setup: Setup, seed: int) -> Report:
    """Simulate a set-up. base: what a calibration does not choose; its engines and its policy are not used.

    Raises ValueError if a turn exceeds an engine's KV cache or the weights exceed the GPU's memory.
    """
    engines = {Pool.SPECULATIVE: setup.speculative, Pool.GREEDY: setup.greedy}
    fleet = replace(base.fleet, engines=engines)
    policy = policy_named(setup.policy, setup.threshold_tokens)
    return report_of(sessions, replace(base, fleet=fleet, policy=policy, seed=seed))


def thresholds(sessions: Sequence[SessionTrace]) -> dict[str, list[int]]:
    """The values of τ to try, by policy: quantiles of the workload's ΔL and L, without the longest."""
    turns = [
        (turn.prompt_tokens, base)
        for session in sessions
        for turn, base in zip(session.turns, session.base_tokens(), strict=True)
    ]
    lengths = {
        "DeltaPrefill": sorted(length - base for length, base in turns),
        "TotalLength": sorted(length for length, _ in turns),
    }
    parts = THRESHOLDS + 1
    return {
        policy: sorted({values[len(values) * part // parts] for part in range(1, parts)} - {values[-1]})
        for policy, values in lengths.items()
    }


@dataclass
class Search:
    """Simulates set-ups, each at most once with each seed.

    thresholds: the values of τ to try, by policy.
    """

    measure: Measure
    thresholds: Mapping[str, Sequence[int]]
    goal: Goal
    results: dict[tuple[Setup, int], Report] = field(default_factory=dict)

    def run(self, splits: Sequence[int], engines: int) -> dict[Setup, Report]:
        """Simulate every policy on every split, and return the finalists with their mean figures, best first.

        splits: the permitted numbers of speculative engines out of `engines`.
        """
        for split in splits:
            for setup in self._setups(split, engines - split):
                self._once(setup, SEEDS[0])
        finalists = {setup: self.mean(setup) for setup in self.explored[:FINALISTS]}
        return dict(sorted(finalists.items(), key=lambda item: (self.goal.score(item[1]), item[0])))

    @property
    def explored(self) -> list[Setup]:
        """Every set-up that was simulated, the best one with the first seed first."""
        first = {setup: figures for (setup, seed), figures in self.results.items() if seed == SEEDS[0]}
        return sorted(first, key=lambda setup: (self.goal.score(first[setup]), setup))

    def mean(self, setup: Setup) -> Report:
        """The figures of a set-up, averaged over all seeds."""
        return mean_of([self._once(setup, seed) for seed in SEEDS])

    def _setups(self, speculative: int, greedy: int) -> list[Setup]:
        if not speculative:
            return [Setup(0, greedy, "AlwaysGreedy")]
        if not greedy:
            return [Setup(speculative, 0, "AlwaysSpeculative")]
        return [
            *(Setup(speculative, greedy, policy) for policy in OTHER_POLICIES),
            *(
                Setup(speculative, greedy, policy, tokens)
                for policy in THRESHOLD_POLICIES
                for tokens in self.thresholds[policy]
            ),
        ]

    def _once(self, setup: Setup, seed: int) -> Report:
        key = setup, seed
        if key not in self.results:
            self.results[key] = self.measure(setup, seed)
        return self.results[key]


@dataclass(frozen=True)
class Rule:
    """How replicas move within a GPU budget. `gain`: the relative decrease of the objective from equal loads."""

    load_ratio: float
    gain: float


def find_rule(figures: Mapping[float, Report], goal: Goal) -> Rule:
    """The best of several load ratios, which contain 1. A gain of less than FLAT does not count."""
    best = min(figures, key=lambda ratio: goal.score(figures[ratio]))
    gain = 1 - goal.value(figures[best]) / goal.value(figures[1.0])
    if gain < FLAT and goal.excess(figures[1.0]) <= goal.excess(figures[best]):
        return Rule(1.0, 0.0)
    return Rule(best, gain)
