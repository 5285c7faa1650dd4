"""The demo's plot: batch time by load for each fleet, and the turns of a replay during which a gateway is killed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dps_lab.replay.records import ReplayResult
from dps_lab.simulate.report import Report

COLORS: Final = ("#7f7f7f", "#d98b2b", "#b5527a", "#2f6db3", "#8a5fa8", "#2e8b57", "#8fbf3f")
"""One for each fleet, in their order."""
POOLS: Final = {"speculative": "#d98b2b", "greedy": "#7f7f7f"}

Comparisons = Mapping[str, Mapping[str, Mapping[int, Report]]]
"""The results of each fleet at each number of concurrent sessions, by the kind of speculation."""


@dataclass(frozen=True)
class Outage:
    """The time between the kill of a gateway and its return to service, in seconds since the start of the replay."""

    url: str
    began: float
    ended: float


def draw_demo(comparisons: Comparisons, replayed: ReplayResult, outage: Outage | None, path: Path) -> None:
    """Write the plot as a PNG file, and create its folder."""
    figure = Figure(figsize=(11.5, 7.6), layout="constrained")
    grid = figure.add_gridspec(2, len(comparisons))
    for column, (speculation, results) in enumerate(comparisons.items()):
        _batch_times(figure.add_subplot(grid[0, column]), f"{speculation} speculation (simulated)", results)
    _timeline(figure.add_subplot(grid[1, :]), replayed, outage)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _batch_times(axes: Axes, title: str, results: Mapping[str, Mapping[int, Report]]) -> None:
    for color, (name, reports) in zip(COLORS, results.items(), strict=True):
        levels = list(reports)
        axes.plot(levels, [reports[c].batch_seconds for c in levels], marker="o", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = list(next(iter(results.values())))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(title=title, xlabel="concurrent sessions", ylabel="batch time, s")
    axes.legend()


def _timeline(axes: Axes, run: ReplayResult, outage: Outage | None) -> None:
    width = max(run.wall_seconds / 60, 0.05)
    edges = np.arange(0.0, run.wall_seconds + 2 * width, width)
    answered = [record for record in run.turns if record.error is None]
    ends: Sequence[list[float]] = [
        [each.started + each.latency for each in answered if each.verdict.pool == pool] for pool in POOLS
    ]
    axes.hist(ends, bins=edges.tolist(), stacked=True, color=list(POOLS.values()), label=list(POOLS))
    if outage is not None:
        axes.axvspan(outage.began, outage.ended, color="#f6dedb", linewidth=0, zorder=0)
        axes.annotate(
            "one of two gateways killed, restarted",
            (outage.began, 0.95),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            color="#c0392b",
        )
    axes.set(title="Turns by pool while a gateway is killed (real time)", xlabel="seconds", ylabel="turns")
    axes.legend(title="pool", loc="upper right")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
