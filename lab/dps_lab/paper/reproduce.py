"""Simulates every result of the paper. This module performs no I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dps_lab.paper.further_results import FURTHER_RUNS, further_results
from dps_lab.paper.published import (
    CONCURRENCIES,
    TABLE_1,
    TABLE_1_THRESHOLD,
    TABLE_2,
    TABLE_2_THRESHOLD,
    TABLE_3,
    Benchmark,
    Method,
    scenario,
)
from dps_lab.paper.rank_test import mann_whitney
from dps_lab.paper.value import PaperValue, Progress, Role, sequential_columns
from dps_lab.simulate.report import Report, session_seconds, summarize
from dps_lab.simulate.run import simulate
from dps_lab.simulate.trace import SessionTrace

RUNS = 2 * 3 * len(CONCURRENCIES) + 2 + len(TABLE_3) + FURTHER_RUNS
"""Number of simulated runs, each of which `reproduce` reports to `progress`."""


@dataclass(frozen=True)
class RankComparison:
    """The p-value of the difference between two methods' session latencies at concurrency 1."""

    benchmark: Benchmark
    first: Method
    second: Method
    p_value: float


@dataclass(frozen=True)
class Reproduction:
    """Every value of Tables 1, 2 and 3 and of the further results, and the tests of section 4.2."""

    cells: tuple[PaperValue, ...]
    comparisons: tuple[RankComparison, ...]


@dataclass(frozen=True)
class _Run:
    report: Report
    sessions: list[float]


def reproduce(sessions: Mapping[Benchmark, Sequence[SessionTrace]], progress: Progress) -> Reproduction:
    """Simulate every run of the tables and the further results; `progress` is called with a description before each."""

    def run(benchmark: Benchmark, method: Method, concurrency: int, threshold: int | None) -> _Run:
        suffix = f", τ = {'∞' if threshold is None else threshold}" if method == "DPS" else ""
        progress(f"{benchmark}, {method}, c = {concurrency}{suffix}")
        chosen = scenario(method, concurrency, threshold)
        results = simulate(sessions[benchmark], chosen)
        return _Run(summarize(results, chosen.fleet.gpus, 0.0), session_seconds(results))

    table_2 = {
        (benchmark, method, concurrency): run(benchmark, method, concurrency, TABLE_2_THRESHOLD)
        for benchmark, method in TABLE_2
        for concurrency in CONCURRENCIES
    }
    sequential = {
        (benchmark, method): run(benchmark, method, 1, TABLE_1_THRESHOLD)
        if method == "DPS"
        else table_2[benchmark, method, 1]
        for benchmark, method in TABLE_1
    }
    table_3 = {threshold: run("ToolBench", "DPS", 1, threshold) for threshold in TABLE_3}
    return Reproduction(
        cells=(
            *_table_1({key: value.report for key, value in sequential.items()}),
            *_table_2({key: value.report for key, value in table_2.items()}),
            *_table_3({key: value.report for key, value in table_3.items()}),
            *further_results(sessions, sequential["ToolBench", "DPS"].report, progress),
        ),
        comparisons=tuple(
            RankComparison(
                benchmark,
                "DPS",
                other,
                mann_whitney(sequential[benchmark, "DPS"].sessions, sequential[benchmark, other].sessions),
            )
            for benchmark in sessions
            for other in _BASELINES
        ),
    )


_BASELINES: tuple[Method, ...] = ("Greedy", "Always-Spec")


def _table_1(reports: dict[tuple[Benchmark, Method], Report]) -> Iterator[PaperValue]:
    for (benchmark, method), values in TABLE_1.items():
        role: Role = "predicted" if method == "DPS" else "fitted"
        for column, paper, simulated in sequential_columns(values, reports[benchmark, method]):
            yield PaperValue(
                1, f"{benchmark}, {method}", column, paper, simulated, _role(benchmark, column, role)
            )


def _table_2(reports: dict[tuple[Benchmark, Method, int], Report]) -> Iterator[PaperValue]:
    for (benchmark, method), values in TABLE_2.items():
        for concurrency, paper in zip(CONCURRENCIES, values, strict=True):
            simulated = reports[benchmark, method, concurrency].batch_seconds
            role: Role = "predicted" if concurrency == CONCURRENCIES[-1] else "fitted"
            yield PaperValue(2, f"{benchmark}, {method}", f"c = {concurrency} (s)", paper, simulated, role)


def _table_3(reports: dict[int | None, Report]) -> Iterator[PaperValue]:
    for threshold, (*values, share) in TABLE_3.items():
        row = f"τ = {'∞' if threshold is None else threshold}"
        report = reports[threshold]
        for column, paper, simulated in sequential_columns(values, report):
            yield PaperValue(3, row, column, paper, simulated, "predicted")
        yield PaperValue(3, row, "Spec %", share, 100 * report.speculative_share, "predicted")


def _role(benchmark: Benchmark, column: str, role: Role) -> Role:
    """ToolBench's tokens/s exceed what the GPU's memory bandwidth allows, so they are not fitted."""
    return "predicted" if benchmark == "ToolBench" and column == "TPS" else role
