"""Policies and fleets compared: with the best static policy (regret), and at several loads. No clock, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from rich import box
from rich.table import Table

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.decision import Policy
from dps_gateway.routing.policies import AlwaysGreedy, AlwaysSpeculative, DeltaPrefill, Sticky
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.report import Report, mean_of, report_of, session_seconds
from dps_lab.simulate.run import Load, Scenario, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace

STATIC_POLICIES: Final = (
    AlwaysGreedy(),
    AlwaysSpeculative(),
    DeltaPrefill(64),
    DeltaPrefill(128),
    DeltaPrefill(512),
    DeltaPrefill(2048),
    Sticky(),
)
"""The alternatives that a policy is compared with."""

CONCURRENCIES = (1, 4, 8, 16, 32)
"""The numbers of concurrent sessions that are compared by default."""


def regret(sessions: Sequence[SessionTrace], scenario: Scenario, results: Sequence[TurnResult]) -> float:
    """The relative increase of the mean session latency of `results` over that of the best alternative.

    0 if no alternative is faster, or if the fleet has only one kind of engine and there is no routing decision.
    """
    if not all(scenario.fleet.engines[pool] for pool in Pool):
        return 0.0
    own = fmean(session_seconds(results))
    others = (
        fmean(session_seconds(simulate(sessions, replace(scenario, policy=policy))))
        for policy in STATIC_POLICIES
        if policy != scenario.policy
    )
    return own / min(own, *others) - 1


def contenders(base: FleetSpec, threshold: int | None) -> dict[str, tuple[FleetSpec, Policy]]:
    """The fleets of one kind, and one engine of each kind with each policy, by name.

    base: everything about the fleets but their engines. threshold: τ in tokens.
    """

    def fleet(speculative: int, adaptive: int = 0) -> FleetSpec:
        engines = {Pool.SPECULATIVE: speculative, Pool.GREEDY: 2 - speculative}
        return replace(base, engines=engines, adaptive=adaptive)

    tau = f"τ = {'∞' if threshold is None else threshold}"
    found: dict[str, tuple[FleetSpec, Policy]] = {
        "2 greedy": (fleet(0), AlwaysGreedy()),
        "2 speculative": (fleet(2), AlwaysSpeculative()),
        "2 adaptive drafts": (fleet(2, adaptive=2), AlwaysSpeculative()),
        f"1 + 1, DeltaPrefill, {tau}": (fleet(1), DeltaPrefill(threshold)),
        "1 + 1, Sticky": (fleet(1), Sticky()),
        "1 + 1, Adaptive": (fleet(1), Adaptive()),
        "1 adaptive drafts + 1, Adaptive": (fleet(1, adaptive=1), Adaptive()),
    }
    adapts = base.speculation.steps > 0
    return {name: each for name, each in found.items() if adapts or not each[0].adaptive}


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
    return {
        name: {
            level: mean_of(
                [
                    report_of(sessions[seed], change(Scenario(fleet, policy, Load(level), seed=seed)))
                    for seed in seeds
                ]
            )
            for level in concurrencies
        }
        for name, (fleet, policy) in contenders(base, threshold).items()
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
