"""The result of a calibration: the choice, the alternatives, and how flat the optimum is.

This module performs no I/O.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from dps_lab.calibrate.goal import OBJECTIVE_NAMES, Goal
from dps_lab.calibrate.search import Search
from dps_lab.calibrate.setup import THRESHOLD_POLICIES, Measurement, Setup

DEFAULT_POLICY: Final = "DeltaPrefill"
DEFAULT_THRESHOLD: Final = 128
"""The gateway's defaults, with which the choice is compared."""

FLAT: Final = 0.02
"""Results that differ by less than this share count as equal."""


@dataclass(frozen=True)
class Alternative:
    """Another set-up. `loss` is the relative increase of the objective over the choice's: 0.1 means 10 % more."""

    name: str
    setup: Setup
    figures: Measurement
    loss: float


@dataclass(frozen=True)
class Flatness:
    """The thresholds next to the chosen one whose results are within FLAT of it, of those that were tried."""

    lowest_tokens: int
    highest_tokens: int
    tried: int


@dataclass(frozen=True)
class Calibration:
    """The result. `excess` is the largest relative amount by which the choice exceeds a limit; 0 if none."""

    goal: Goal
    choice: Setup
    figures: Measurement
    excess: float
    alternatives: tuple[Alternative, ...]
    flatness: Flatness | None
    runs: int

    def as_json(self) -> dict[str, Any]:
        """A JSON object. Times are in seconds."""
        return {
            "objective": self.goal.objective,
            "limits": dict(self.goal.limits),
            "limits_met": self.excess == 0,
            "choice": {**asdict(self.choice), "figures": asdict(self.figures)},
            "alternatives": [
                {
                    "name": each.name,
                    **asdict(each.setup),
                    "loss": each.loss,
                    "figures": asdict(each.figures),
                }
                for each in self.alternatives
            ],
            "flatness": None if self.flatness is None else asdict(self.flatness),
            "verdict": self.verdict(),
            "runs": self.runs,
        }

    def verdict(self) -> str:
        """A sentence on whether two pools are worthwhile."""
        name = OBJECTIVE_NAMES[self.goal.objective]
        where = "for this workload and load"
        single = self._best(two_pools=False)
        mixed = self._best(two_pools=True)
        if single is None or mixed is None:
            return "Two pools were not compared, because they need two engines."
        if mixed.setup != self.choice:
            if self._exceeds_limits(mixed):
                return f"Two pools are not worthwhile {where}: no set-up of two pools meets the limits."
            opinion = "gain nothing" if mixed.loss < FLAT else "are not worthwhile"
            return (
                f"Two pools {opinion} {where}: compared with {self.choice.fleet}, the {name} of "
                f"the best set-up of two pools, {mixed.setup}, is {_percent(mixed.loss)}."
            )
        if self._exceeds_limits(single):
            return f"Two pools are worthwhile {where}: no fleet with one pool meets the limits."
        if single.loss < FLAT:
            return (
                f"Two pools gain little {where}: with {single.setup.fleet}, which is simpler, "
                f"the {name} is {_percent(single.loss)}."
            )
        return (
            f"Two pools are worthwhile {where}: with {single.setup.fleet}, the better of "
            f"the fleets with one pool, the {name} is {_percent(single.loss)}."
        )

    def _exceeds_limits(self, other: Alternative) -> bool:
        """Whether another set-up does not meet the limits, although the choice does."""
        return self.excess == 0 and self.goal.excess(other.figures) > 0

    def _best(self, *, two_pools: bool) -> Alternative | None:
        """The best set-up of this kind, the choice included."""
        own = Alternative("choice", self.choice, self.figures, 0.0)
        found = [each for each in (own, *self.alternatives) if each.setup.two_pools is two_pools]
        return min(found, key=lambda each: self.goal.score(each.figures), default=None)


def conclude(search: Search, goal: Goal, finalists: dict[Setup, Measurement], alone: int) -> Calibration:
    """Choose the best finalist, and compare it with the alternatives. alone: the engines of a fleet with one pool."""
    choice, figures = next(iter(finalists.items()))
    alternatives = []
    for name, setup in _alternatives(choice, search, goal, alone):
        measured = search.mean(setup)
        loss = goal.value(measured) / goal.value(figures) - 1
        alternatives.append(Alternative(name, setup, measured, loss))
    return Calibration(
        goal=goal,
        choice=choice,
        figures=figures,
        excess=max(0.0, goal.excess(figures)),
        alternatives=tuple(alternatives),
        flatness=_flatness(choice, search, goal),
        runs=search.runs,
    )


def _alternatives(choice: Setup, search: Search, goal: Goal, alone: int) -> Iterator[tuple[str, Setup]]:
    engines = choice.speculative + choice.greedy
    named = [
        ("greedy only", Setup(0, alone, "AlwaysGreedy")),
        ("always speculative", Setup(alone, 0, "AlwaysSpeculative")),
    ]
    if engines > 1:
        split = choice.speculative if choice.two_pools else engines - engines // 2
        named.append(("default", Setup(split, engines - split, DEFAULT_POLICY, DEFAULT_THRESHOLD)))
    ordered = sorted(search.explored, key=lambda setup: goal.score(search.explored[setup]))
    best_of = {
        setup.policy: setup
        for setup in reversed(ordered)
        if setup.two_pools and not setup.policy.startswith("Always")
    }
    named += [(f"best {policy}", setup) for policy, setup in best_of.items()]
    return ((name, setup) for name, setup in named if setup != choice)


def _flatness(choice: Setup, search: Search, goal: Goal) -> Flatness | None:
    if choice.policy not in THRESHOLD_POLICIES:
        return None
    family = sorted(
        (setup.threshold_tokens or 0, goal.value(figures))
        for setup, figures in search.explored.items()
        if (setup.fleet, setup.policy) == (choice.fleet, choice.policy)
    )
    thresholds = [tokens for tokens, _ in family]
    centre = thresholds.index(choice.threshold_tokens or 0)
    limit = family[centre][1] * (1 + FLAT)
    below = _reach(family[centre::-1], limit)
    above = _reach(family[centre:], limit)
    return Flatness(below, above, len(family))


def _reach(family: Sequence[tuple[int, float]], limit: float) -> int:
    """The last threshold before the first whose value exceeds the limit."""
    last = family[0][0]
    for tokens, value in family:
        if value > limit:
            break
        last = tokens
    return last


def _percent(loss: float) -> str:
    share = f"{abs(loss):.1%}"
    return "the same" if share == "0.0%" else f"{share} {'higher' if loss > 0 else 'lower'}"
