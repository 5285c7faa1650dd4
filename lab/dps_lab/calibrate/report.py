"""The result of a calibration, and its forms: a table, JSON, a patch for a DPSRouter, and a recommendation."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Final

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from dps_lab.calibrate.search import FLAT, Goal, Rule, Search, Setup
from dps_lab.simulate.report import Report

DEFAULT_POLICY: Final = "DeltaPrefill"
DEFAULT_THRESHOLD: Final = 128
"""The gateway's defaults, with which the choice is compared."""


@dataclass(frozen=True)
class Alternative:
    """Another set-up. `loss` is the relative increase of the objective over the choice's: 0.1 means 10 % more."""

    name: str
    setup: Setup
    figures: Report
    loss: float


@dataclass(frozen=True)
class Calibration:
    """The result.

    flat: the lowest and the highest threshold next to the chosen one whose results are within FLAT of it; None if the
    policy has no threshold. rule: that of the GPU budget; None without one. runs: number of simulations.
    """

    goal: Goal
    choice: Setup
    figures: Report
    alternatives: tuple[Alternative, ...]
    flat: tuple[int, int] | None
    rule: Rule | None
    runs: int

    @property
    def excess(self) -> float:
        """The largest relative amount by which the choice exceeds a limit; 0 if it meets all."""
        return self.goal.excess(self.figures)

    @property
    def routing(self) -> dict[str, Any]:
        """The keys of `routing` that the choice determines, in a gateway's configuration and in a DPSRouter."""
        tokens = self.choice.threshold_tokens
        return {"policy": self.choice.policy} | ({} if tokens is None else {"thresholdTokens": tokens})

    def as_json(self) -> dict[str, Any]:
        """A JSON object. Times are in seconds."""
        return {
            "objective": self.goal.objective,
            "limits": dict(self.goal.limits),
            "limits_met": self.excess == 0,
            "choice": {**asdict(self.choice), "figures": asdict(self.figures)},
            "alternatives": [
                {"name": each.name, **asdict(each.setup), "loss": each.loss, "figures": asdict(each.figures)}
                for each in self.alternatives
            ],
            "flat_thresholds": self.flat,
            "budget": None if self.rule is None else asdict(self.rule),
            "verdict": self.verdict(),
            "runs": self.runs,
        }

    def verdict(self) -> str:
        """A sentence on whether two pools are worthwhile."""
        where, name = "for this workload and load", self.goal.name
        single, mixed = self._best(two_pools=False), self._best(two_pools=True)
        if single is None or mixed is None:
            return "Two pools were not compared, because they need two engines."
        chose_two, other = (True, single) if mixed.setup == self.choice else (False, mixed)
        opinion = "are worthwhile" if chose_two else "are not worthwhile"
        if self.excess == 0 and self.goal.excess(other.figures) > 0:
            missing = "no fleet with one pool" if chose_two else "no set-up of two pools"
            return f"Two pools {opinion} {where}: {missing} meets the limits."
        if other.loss < FLAT:
            opinion = "gain little" if chose_two else "gain nothing"
        compared = f"with {single.setup.fleet}" if chose_two else f"with the best of them, {mixed.setup}"
        return f"Two pools {opinion} {where}: {compared}, the {name} is {_percent(other.loss)}."

    def patch(self) -> str:
        """A merge patch for a DPSRouter, in YAML. Each pool of a DPSRouter has at least one replica."""
        replicas = {"speculative": self.choice.speculative, "greedy": self.choice.greedy}
        pools = {pool: {"replicas": max(1, count)} for pool, count in replicas.items()}
        text = yaml.safe_dump({"spec": {"routing": self.routing, "pools": pools}}, sort_keys=False)
        if self.choice.two_pools:
            return text
        unused = "greedy" if self.choice.speculative else "speculative"
        return (
            f"# A DPSRouter has at least one replica in each pool. That of the {unused} pool, one more than was\n"
            f"# calibrated, serves only when no replica of the other pool can.\n{text}"
        )

    def recommendation(self) -> str:
        """The choice as one JSON object, which fits into the termination message of a container (4,096 bytes).

        The operator reads it and adds the time (`status.routing.recommended`). `seconds`: the minimised figure.
        """
        document: dict[str, Any] = {
            **self.routing,
            "objective": self.goal.objective,
            "seconds": round(self.goal.value(self.figures), 3),
            "verdict": self.verdict(),
        }
        if self.rule is not None:
            document["gpuBudget"] = {
                "speculativeReplicas": self.choice.speculative,
                "greedyReplicas": self.choice.greedy,
                "loadRatio": self.rule.load_ratio,
            }
        return json.dumps(document)

    def print(self, title: str, console: Console) -> None:
        """Print the choice and its alternatives, how flat the optimum is, and whether two pools are worthwhile."""
        table = Table(
            title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for column in ("", "engines", "policy, τ"):
            table.add_column(column, no_wrap=column == "policy, τ")
        for column in ("session", "TTFT p95", "TPOT", "batch", "loss"):
            table.add_column(column, justify="right")
        table.add_row("choice", *_columns(self.choice, self.figures), "", style="bold")
        for each in self.alternatives:
            table.add_row(
                each.name.split()[0] if each.setup.two_pools else each.name,
                *_columns(each.setup, each.figures),
                f"{each.loss:+.1%}",
            )
        console.print(table)
        for line in self._lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _lines(self) -> Iterator[str]:
        yield (
            "Engines: speculative + greedy. Times are in seconds, medians unless stated. Loss: relative increase of "
            "the minimised figure over the choice's."
        )
        yield f"Minimised: {self.goal.name}; {self.runs} simulations."
        if self.excess:
            yield f"No set-up meets the limits. The choice comes closest: it exceeds one of them by {self.excess:.1%}."
        if self.flat is not None:
            lowest, highest = self.flat
            yield (
                f"With the same engines and policy, τ from {lowest:,} to {highest:,} tokens is within {FLAT:.0%} of "
                "the choice."
            )
        yield self.verdict()
        if self.rule is not None and self.rule.load_ratio == 1:
            yield "Rule of the budget: equal loads."
        elif self.rule is not None:
            yield (
                f"Rule of the budget: load ratio {self.rule.load_ratio:g}, {self.rule.gain:.1%} better than with "
                "equal loads."
            )
        yield f"Gateway configuration: {json.dumps({'routing': self.routing})}"

    def _best(self, *, two_pools: bool) -> Alternative | None:
        """The best set-up of this kind, the choice included."""
        own = Alternative("choice", self.choice, self.figures, 0.0)
        found = [each for each in (own, *self.alternatives) if each.setup.two_pools is two_pools]
        return min(found, key=lambda each: self.goal.score(each.figures), default=None)


def conclude(search: Search, finalists: dict[Setup, Report], alone: int) -> Calibration:
    """Choose the best finalist, and compare it with the alternatives. alone: the engines of a fleet with one pool."""
    choice, figures = next(iter(finalists.items()))
    goal = search.goal
    alternatives = []
    for name, setup in _alternatives(choice, search, alone).items():
        measured = search.mean(setup)
        loss = goal.value(measured) / goal.value(figures) - 1
        alternatives.append(Alternative(name, setup, measured, loss))
    flat = _flat(choice, search)
    return Calibration(goal, choice, figures, tuple(alternatives), flat, None, len(search.results))


def _alternatives(choice: Setup, search: Search, alone: int) -> dict[str, Setup]:
    """Fleets of one kind, the gateway's defaults, and the best set-up of every policy that uses both pools."""
    engines = choice.speculative + choice.greedy
    named = {
        "greedy only": Setup(0, alone, "AlwaysGreedy"),
        "always speculative": Setup(alone, 0, "AlwaysSpeculative"),
    }
    if engines > 1:
        split = choice.speculative if choice.two_pools else engines - engines // 2
        named["default"] = Setup(split, engines - split, DEFAULT_POLICY, DEFAULT_THRESHOLD)
    for setup in search.explored:
        if setup.two_pools and not setup.policy.startswith("Always"):
            named.setdefault(f"best {setup.policy}", setup)
    return {name: setup for name, setup in named.items() if setup != choice}


def _flat(choice: Setup, search: Search) -> tuple[int, int] | None:
    """The range of thresholds around the chosen one that are within FLAT of it with the first seed."""
    if choice.threshold_tokens is None:
        return None
    family = {
        setup.threshold_tokens or 0: search.goal.value(figures)
        for (setup, seed), figures in search.results.items()
        if seed == 0 and (setup.fleet, setup.policy) == (choice.fleet, choice.policy)
    }
    limit = family[choice.threshold_tokens] * (1 + FLAT)
    ordered = sorted(family)
    place = ordered.index(choice.threshold_tokens)
    lower, higher = (
        list(takewhile(lambda tokens: family[tokens] <= limit, run))
        for run in (reversed(ordered[: place + 1]), ordered[place:])
    )
    return lower[-1], higher[-1]


def _columns(setup: Setup, figures: Report) -> tuple[str, ...]:
    threshold = "" if setup.threshold_tokens is None else f", {setup.threshold_tokens:,}"
    return (
        f"{setup.speculative} + {setup.greedy}",
        f"{setup.policy}{threshold}" if setup.two_pools else "",
        f"{figures.session_seconds.median:,.3f}",
        f"{figures.time_to_first_token_seconds.p95:,.3f}",
        f"{figures.time_per_token_seconds:.4f}",
        f"{figures.batch_seconds:,.1f}",
    )


def _percent(loss: float) -> str:
    share = f"{abs(loss):.1%}"
    return "the same" if share == "0.0%" else f"{share} {'higher' if loss > 0 else 'lower'}"
