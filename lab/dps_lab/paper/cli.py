"""`dps reproduce`: simulate the results in the paper, and compare them with the published values."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from dps_lab.paper.plots import draw_reproduction
from dps_lab.paper.published import BENCHMARKS, benchmark_sessions
from dps_lab.paper.reproduce import RUNS, RankComparison, reproduce
from dps_lab.paper.value import PaperValue

TITLES = {
    1: "Table 1: sequential runs (c = 1)",
    2: "Table 2: batch time by concurrency, τ = 128, serialized speculation",
    3: "Table 3: ToolBench by threshold (c = 1)",
    4: "Section 4.4: the total length L as the routing signal (ToolBench, c = 1)",
    5: "Sections 4.1 and 4.4: the workloads",
    6: "Table 1, D and E, and section 4.4: other engines (c = 1)",
}


def main(argv: list[str]) -> int:
    """Simulate the paper's tables and print them. Returns 0; exits with 2 if the command line is invalid."""
    parser = argparse.ArgumentParser(
        prog="dps reproduce",
        description=(
            "Simulate the results in the paper's tables and ablations, and compare them with the published values. "
            "Takes one to two minutes."
        ),
        epilog="docs/simulation-results.md states which values the time model was fitted to, and where it is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots of the results as PNG files")
    options = parser.parse_args(argv)
    if options.plots is not None:
        try:
            options.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(
                f"--plots {options.plots}: the folder cannot be created ({error.strerror}); choose another one"
            )
    messages = Console(stderr=True)
    done = 0

    def progress(description: str) -> None:
        nonlocal done
        done += 1
        messages.print(f"[{done}/{RUNS}] {description}", markup=False, highlight=False)

    sessions = {name: benchmark_sessions(name) for name in BENCHMARKS}
    outcome = reproduce(sessions, progress)
    if options.plots is not None:
        draw_reproduction(outcome.cells, sessions, options.plots)
    if options.json:
        print(json.dumps({**asdict(outcome), "cells": [_as_json(cell) for cell in outcome.cells]}))
        return 0
    console = Console()
    for number, cells in groupby(outcome.cells, key=lambda cell: cell.table):
        console.print(_table(TITLES[number], cells))
    console.print(_tests(outcome.comparisons))
    return 0


def _as_json(cell: PaperValue) -> dict[str, object]:
    return {**asdict(cell), "error": cell.error}


def _table(title: str, cells: Iterable[PaperValue]) -> Table:
    table = _new_table(title, "", "", "paper", "simulated", "error", "")
    for cell in cells:
        error = "-" if cell.error is None else f"{cell.error:+.1%}"
        table.add_row(cell.row, cell.column, _value(cell.paper), _value(cell.simulated), error, cell.role)
    return table


def _tests(comparisons: Iterable[RankComparison]) -> Table:
    table = _new_table("Mann-Whitney U of session latencies (c = 1)", "benchmark", "methods", "p")
    for comparison in comparisons:
        p_value = "< 0.0001" if comparison.p_value < 1e-4 else f"{comparison.p_value:.4f}"
        table.add_row(comparison.benchmark, f"{comparison.first} and {comparison.second}", p_value)
    return table


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if 2 <= index <= 4 else "left")
    return table


def _value(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"
