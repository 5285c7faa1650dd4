"""`dps reproduce`: simulate the results in the paper's tables, and compare them with the published values."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from dps_lab.paper.published import (
    BENCHMARKS,
    CONCURRENCIES,
    TABLE_1,
    TABLE_1_THRESHOLD,
    TABLE_2,
    TABLE_2_THRESHOLD,
    TABLE_3,
    Benchmark,
    Method,
    benchmark_sessions,
    scenario,
)
from dps_lab.simulate.report import Report, report_of
from dps_lab.simulate.trace import SessionTrace

TITLES = {
    1: "Table 1: sequential runs (c = 1)",
    2: "Table 2: batch time by concurrency, τ = 128, serialized speculation",
    3: "Table 3: ToolBench by threshold (c = 1)",
}
RUNS = 2 * 3 * len(CONCURRENCIES) + 2 + len(TABLE_3)
"""Number of simulated runs, each of which `reproduce` reports to `progress`."""


@dataclass(frozen=True)
class PaperValue:
    """One value of the paper's Tables 1 to 3 and its simulation. fitted: the time model was fitted to it."""

    table: int
    row: str
    column: str
    paper: float
    simulated: float
    role: Literal["fitted", "predicted"]

    @property
    def error(self) -> float | None:
        """The relative error of the simulated value; None if the paper's value is 0."""
        return self.simulated / self.paper - 1 if self.paper else None


def reproduce(
    sessions: Mapping[Benchmark, Sequence[SessionTrace]], progress: Callable[[str], None]
) -> Iterator[PaperValue]:
    """Simulate every run of Tables 1, 2 and 3; `progress` is called with a description before each."""

    def run(benchmark: Benchmark, method: Method, concurrency: int, threshold: int | None) -> Report:
        suffix = f", τ = {'∞' if threshold is None else threshold}" if method == "DPS" else ""
        progress(f"{benchmark}, {method}, c = {concurrency}{suffix}")
        return report_of(sessions[benchmark], scenario(method, concurrency, threshold))

    batches = {
        (benchmark, method): [run(benchmark, method, level, TABLE_2_THRESHOLD) for level in CONCURRENCIES]
        for benchmark, method in TABLE_2
    }
    for (benchmark, method), values in TABLE_1.items():
        dps = method == "DPS"
        report = run(benchmark, method, 1, TABLE_1_THRESHOLD) if dps else batches[benchmark, method][0]
        for column, simulated, paper in zip(*_sequential(report), values, strict=True):
            # ToolBench's tokens/s exceed what the GPU's memory bandwidth allows, so they are not fitted.
            predicted = dps or (benchmark, column) == ("ToolBench", "TPS")
            role: Literal["fitted", "predicted"] = "predicted" if predicted else "fitted"
            yield PaperValue(1, f"{benchmark}, {method}", column, paper, simulated, role)
    for (benchmark, method), reports in batches.items():
        for level, report, paper in zip(CONCURRENCIES, reports, TABLE_2[benchmark, method], strict=True):
            role = "predicted" if level == CONCURRENCIES[-1] else "fitted"
            row, column = f"{benchmark}, {method}", f"c = {level} (s)"
            yield PaperValue(2, row, column, paper, report.batch_seconds, role)
    for threshold, values_and_share in TABLE_3.items():
        row = f"τ = {'∞' if threshold is None else threshold}"
        report = run("ToolBench", "DPS", 1, threshold)
        columns, figures = _sequential(report)
        for column, simulated, paper in zip(
            (*columns, "Spec %"), (*figures, 100 * report.speculative_share), values_and_share, strict=True
        ):
            yield PaperValue(3, row, column, paper, simulated, "predicted")


def _sequential(report: Report) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The columns of a sequential run, and their values."""
    sessions = report.session_seconds
    return ("Med (s)", "p95 (s)", "TPS"), (sessions.median, sessions.p95, report.tokens_per_second)


def main(argv: list[str]) -> int:
    """Simulate the paper's tables and print them. Returns 0; exits with 2 if the command line is invalid."""
    parser = argparse.ArgumentParser(
        prog="dps reproduce",
        description=(
            "Simulate the results in the paper's tables, and compare them with the published values. Takes a minute."
        ),
        epilog="docs/measurements.md states which values the time model was fitted to, and where it is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    messages = Console(stderr=True)
    done = 0

    def progress(description: str) -> None:
        nonlocal done
        done += 1
        messages.print(f"[{done}/{RUNS}] {description}", markup=False, highlight=False)

    sessions = {name: benchmark_sessions(name) for name in BENCHMARKS}
    cells = list(reproduce(sessions, progress))
    if options.json:
        print(json.dumps({"cells": [{**asdict(cell), "error": cell.error} for cell in cells]}))
        return 0
    for number, found in groupby(cells, key=lambda cell: cell.table):
        table = Table(title=TITLES[number], title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in ("", "", "paper", "simulated", "error", ""):
            table.add_column(column, justify="right" if column else "left")
        for cell in found:
            error = "-" if cell.error is None else f"{cell.error:+.1%}"
            table.add_row(cell.row, cell.column, _value(cell.paper), _value(cell.simulated), error, cell.role)
        Console().print(table)
    return 0


def _value(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"
