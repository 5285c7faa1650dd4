"""Plots of the reproduced results as PNG files, with the paper's values and the simulated ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dps_lab.paper.further_results import turn_lengths
from dps_lab.paper.published import BENCHMARKS, CONCURRENCIES, TABLE_2, TABLE_3, Benchmark
from dps_lab.paper.value import PaperValue
from dps_lab.plots import DPS, FAINT, GREEDY, SPECULATIVE, STYLE
from dps_lab.simulate.trace import SessionTrace

_COLORS = {"DPS": DPS, "Greedy": GREEDY, "Always-Spec": SPECULATIVE}

_DASHED = (0, (4, 3))


def draw_reproduction(
    cells: Sequence[PaperValue], sessions: Mapping[Benchmark, Sequence[SessionTrace]], folder: Path
) -> None:
    """Write concurrency.png (Table 2, Figure 2), threshold.png (Table 3, Figure 3) and lengths.png (section 4.4)."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {(cell.table, cell.row, cell.column): cell for cell in cells}
    with mpl.rc_context(STYLE):
        _save(folder / "concurrency.png", lambda axes: _concurrency(axes, found))
        _save(folder / "threshold.png", lambda axes: _threshold(axes, found))
        _save(folder / "lengths.png", lambda axes: _lengths(axes, sessions))


def _save(path: Path, draw: Callable[[Sequence[Axes]], None]) -> None:
    figure = Figure(figsize=(11.5, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots(1, 2)
    draw(axes)
    for each in axes:
        each.grid(color=FAINT, linewidth=0.6)
        each.legend()
    figure.savefig(path)


def _pair(axes: Axes, x: Sequence[float], cells: Iterable[PaperValue], color: str, label: str) -> None:
    chosen = list(cells)
    axes.plot(
        x, [cell.paper for cell in chosen], "o", linestyle=_DASHED, color=color, label=f"{label}, paper"
    )
    axes.plot(x, [cell.simulated for cell in chosen], "o-", color=color, label=f"{label}, simulated")


def _concurrency(axes: Sequence[Axes], found: Mapping[tuple[int, str, str], PaperValue]) -> None:
    for each, benchmark in zip(axes, BENCHMARKS, strict=True):
        for owner, method in TABLE_2:
            if owner == benchmark:
                row = [found[2, f"{benchmark}, {method}", f"c = {count} (s)"] for count in CONCURRENCIES]
                _pair(each, CONCURRENCIES, row, _COLORS[method], method)
        each.set(
            title=f"Table 2: {benchmark}, τ = 128",
            xlabel="concurrent sessions",
            ylabel="seconds for all sessions",
            xticks=CONCURRENCIES,
            ylim=(0, None),
        )


def _threshold(axes: Sequence[Axes], found: Mapping[tuple[int, str, str], PaperValue]) -> None:
    thresholds = [threshold for threshold in TABLE_3 if threshold]
    for each, column, color in zip(axes, ("Med (s)", "Spec %"), (DPS, SPECULATIVE), strict=True):
        _pair(each, thresholds, [found[3, f"τ = {value}", column] for value in thresholds], color, column)
        each.set(title="Table 3: ToolBench by threshold", xlabel="τ, tokens (log scale)", ylabel=column)
        each.set_xscale("log", base=2)


def _lengths(axes: Sequence[Axes], sessions: Mapping[Benchmark, Sequence[SessionTrace]]) -> None:
    for benchmark, color in zip(BENCHMARKS, (DPS, SPECULATIVE), strict=True):
        for each, (name, values) in zip(axes, turn_lengths(sessions[benchmark]).items(), strict=True):
            shares = [(index + 1) / len(values) for index in range(len(values))]
            each.step(values, shares, where="post", color=color, label=benchmark)
            each.set(
                title=f"{name} of all turns, cumulative",
                xlabel=f"{name}, tokens (log scale)",
                ylabel="share of turns",
                xscale="log",
            )
    shares_of_paper = [(value, row[3] / 100) for value, row in TABLE_3.items() if value]
    axes[0].plot(*zip(*shares_of_paper, strict=True), "o", color=GREEDY, label="ToolBench, paper (Table 3)")
