"""Fleets of two engines, and policies that route between them, compared at several loads. No clock, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.decision import Policy
from dps_gateway.routing.policies import AlwaysGreedy, AlwaysSpeculative, DeltaPrefill, Sticky
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.report import Report, mean_of, summarize
from dps_lab.simulate.run import Load, Scenario, simulate
from dps_lab.simulate.trace import SessionTrace

CONCURRENCIES = (1, 4, 8, 16, 32)
"""The numbers of concurrent sessions that are compared by default."""


@dataclass(frozen=True)
class Contender:
    """Two engines, and the policy that routes between them. adaptive: see `FleetSpec.adaptive`."""

    name: str
    speculative: int
    policy: Policy
    adaptive: int = 0

    def fleet(self, base: FleetSpec) -> FleetSpec:
        """`base` with these engines."""
        engines = {Pool.SPECULATIVE: self.speculative, Pool.GREEDY: 2 - self.speculative}
        return replace(base, engines=engines, adaptive=self.adaptive)


def contenders(threshold: int | None, adaptive: bool) -> list[Contender]:
    """The fleets of one kind, and one engine of each kind with each policy.

    threshold: τ in tokens. adaptive: whether there are engines that adapt their draft length.
    """
    found = [
        Contender("2 greedy", 0, AlwaysGreedy()),
        Contender("2 speculative", 2, AlwaysSpeculative()),
        Contender("2 adaptive drafts", 2, AlwaysSpeculative(), adaptive=2),
        Contender(
            f"1 + 1, DeltaPrefill, τ = {'∞' if threshold is None else threshold}", 1, DeltaPrefill(threshold)
        ),
        Contender("1 + 1, Sticky", 1, Sticky()),
        Contender("1 + 1, Adaptive", 1, Adaptive()),
        Contender("1 adaptive drafts + 1, Adaptive", 1, Adaptive(), adaptive=1),
    ]
    return [each for each in found if adaptive or not each.adaptive]


def compare(
    workload: Callable[[int], Sequence[SessionTrace]],
    base: FleetSpec,
    threshold: int | None,
    concurrencies: Sequence[int] = CONCURRENCIES,
    seeds: Sequence[int] = (0,),
    change: Callable[[Scenario], Scenario] = lambda scenario: scenario,
) -> dict[str, dict[int, Report]]:
    """The results of each contender, by name and by number of concurrent sessions, as means over the seeds.

    workload: the sessions for a seed. base: everything about the fleets but their engines. change: how the runs differ
    from `Scenario`'s defaults. Raises ValueError as `simulate` does.
    """
    sessions = {seed: workload(seed) for seed in seeds}

    def report(each: Contender, level: int) -> Report:
        fleet = each.fleet(base)
        runs = {seed: change(Scenario(fleet, each.policy, Load(level), seed=seed)) for seed in seeds}
        return mean_of(
            [summarize(simulate(sessions[seed], run), fleet.gpus, 0.0) for seed, run in runs.items()]
        )

    return {
        each.name: {level: report(each, level) for level in concurrencies}
        for each in contenders(threshold, adaptive=base.speculation.steps > 0)
    }


def comparison_tables(results: Mapping[str, Mapping[int, Report]], title: str) -> list[Table]:
    """Batch time, and median session latency, with a row per fleet and a column per load. The least are marked."""
    figures: dict[str, Callable[[Report], float]] = {
        "time for all sessions, s": lambda report: report.batch_seconds,
        "median session latency, s": lambda report: report.session_seconds.median,
        "mean session latency, s": lambda report: report.session_seconds.mean,
    }
    levels = list(next(iter(results.values())))
    tables = []
    for name, figure in figures.items():
        table = Table(
            title=f"{title}: {name}",
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        table.add_column("concurrent sessions", no_wrap=True)
        for level in levels:
            table.add_column(str(level), justify="right")
        least = {level: min(figure(reports[level]) for reports in results.values()) for level in levels}
        for contender, reports in results.items():
            cells = ((figure(reports[level]), least[level]) for level in levels)
            table.add_row(
                contender, *(f"{value:,.2f}{'*' if value == best else ' '}" for value, best in cells)
            )
        tables.append(table)
    return tables
