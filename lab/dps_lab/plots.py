"""Plots of replays as PNG files. Pools and fleets have the same colour in every panel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.typing import RcKeyType

from dps_lab.fleets import FLEETS, TIE, Fleet, batch_seconds, fastest
from dps_lab.replay.records import ReplayResult
from dps_lab.replay.report import Summary, summarize

DPS, GREEDY, SPECULATIVE = "#1b5e9e", "#7a8793", "#e08214"
INK, FAINT = "#22282e", "#d9dde1"

STYLE: dict[RcKeyType, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Outage:
    """The outage of a gateway: its base URL, and start and end in seconds since the replay began."""

    url: str
    began: float
    ended: float


@dataclass(frozen=True)
class DemoPlot:
    """The data of the demo's plot.

    runs: one for each of FLEETS, in their order.
    faulted: the run in which a gateway was killed.
    threshold_tokens: τ of DPS.
    time_scale: as in `summarize`. The timeline and the outage stay in real seconds.
    urls: the gateways' base URLs.
    """

    runs: Sequence[ReplayResult]
    faulted: ReplayResult
    threshold_tokens: int
    time_scale: float
    urls: Sequence[str]
    outage: Outage | None
    subtitle: str


def draw_demo(plot: DemoPlot, path: Path) -> None:
    """Write a PNG with the times of all fleets, the turns by ΔL and pool, and the turns over time by gateway."""
    rows = sorted(
        zip(FLEETS, (summarize(run, plot.time_scale) for run in plot.runs), strict=True),
        key=lambda row: row[1].wall_seconds,
    )
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12, rect=(0, 0, 1, 0.91))
        figure = Figure(figsize=(11.5, 7.6), dpi=150, layout=layout)
        figure.text(0.014, 0.965, _headline(rows), fontsize=14, weight="bold", va="center")
        figure.text(0.014, 0.927, plot.subtitle, fontsize=9.5, color="#5b656e", va="center")
        axes = figure.subplots(2, 2, height_ratios=(1.35, 1))
        batch = [summary.wall_seconds for _, summary in rows]
        sessions = [0.0 if s.session_latency is None else s.session_latency.median for _, s in rows]
        _bars(axes[0, 0], rows, batch, "Time for all sessions", "{:.1f} s")
        _bars(axes[0, 1], rows, sessions, "Median session latency", "{:.2f} s")
        _legend(axes[0, 0])
        _deltas(axes[1, 0], plot.faulted, plot.threshold_tokens)
        _timeline(axes[1, 1], plot)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


_COLORS = {
    "AlwaysGreedy": GREEDY,
    "AlwaysSpeculative": SPECULATIVE,
    "DeltaPrefill": "#8db4d9",
    "Adaptive": DPS,
}


def _headline(rows: Sequence[tuple[Fleet, Summary]]) -> str:
    """The fastest fleets; those that share a cache are named together."""
    best = fastest([summary for _, summary in rows], batch_seconds)
    fleets = [fleet for fleet, summary in rows if summary in best]
    caches = {
        kind: ", ".join(fleet.name for fleet in fleets if fleet.caches == kind)
        for kind in dict.fromkeys(fleet.caches for fleet in fleets)
    }
    return "Fastest on two engines: " + "; ".join(f"{names} ({kind})" for kind, names in caches.items())


def _bars(
    axes: Axes, rows: Sequence[tuple[Fleet, Summary]], values: Sequence[float], title: str, form: str
) -> None:
    """A bar for each fleet. Those of fleets with separate caches are hatched."""
    bars = axes.barh(
        range(len(rows)), values, color=[_COLORS[fleet.policy] for fleet, _ in rows], height=0.66
    )
    for bar, (fleet, _) in zip(bars, rows, strict=True):
        if fleet.prefix_cache == "separate":
            bar.set(facecolor="white", edgecolor=_COLORS[fleet.policy], hatch="////", linewidth=1)
    labels = axes.bar_label(bars, [form.format(value) for value in values], padding=5)
    best = (1 + TIE) * min(values)
    for label, value in zip(labels, values, strict=True):
        label.set_fontweight("bold" if value <= best else "normal")
    axes.set_yticks(range(len(rows)), [fleet.name for fleet, _ in rows])
    axes.set_xlim(0, max([*values, 0.001]) * 1.45)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(title=title, xlabel="seconds (less is better)")


def _legend(axes: Axes) -> None:
    kinds = [
        Patch(facecolor="#5b656e", edgecolor="#5b656e", label="common prefix cache"),
        Patch(facecolor="white", edgecolor="#5b656e", hatch="////", label="separate prefix caches"),
    ]
    axes.legend(handles=kinds, loc="upper right")


def _deltas(axes: Axes, run: ReplayResult, threshold: int) -> None:
    pools = {"speculative": SPECULATIVE, "greedy": GREEDY}
    values = [
        [
            record.verdict.delta_tokens
            for record in run.turns
            if record.verdict.pool == pool and record.verdict.delta_tokens
        ]
        for pool in pools
    ]
    every = [value for pool in values for value in pool]
    edge = threshold + 0.5  # lengths are integers
    bins = _log_bins(min(every, default=1), max(every, default=10_000), edge)
    axes.hist(values, bins=bins, stacked=True, color=list(pools.values()), label=list(pools), rwidth=0.92)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.axvline(edge, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"τ = {threshold}",
        (edge, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        va="top",
    )
    axes.set(
        title="The rule: turns by prompt growth and pool",
        xlabel="ΔL: prompt growth since the previous turn, tokens (log scale)",
        ylabel="turns",
    )
    axes.legend(title="pool", loc="upper right", alignment="left")


def _log_bins(low: float, high: float, edge: float, ratio: float = 1.17) -> list[float]:
    """Bins of equal width on a logarithmic axis. No bin contains values on both sides of `edge`."""
    below, above = math.ceil(math.log(edge / low, ratio)), math.ceil(math.log(high / edge, ratio))
    return [edge * ratio**step for step in range(-max(below, 1), max(above, 1) + 1)]


def _timeline(axes: Axes, plot: DemoPlot) -> None:
    run = plot.faulted
    width = max(run.wall_seconds / 40, 0.05)
    edges = np.arange(0.0, run.wall_seconds + 2 * width, width)
    ends = [
        [r.started + r.latency for r in run.turns if r.url == url and r.error is None] for url in plot.urls
    ]
    shades = [DPS, "#8db4d9", "#c6d9ec", "#e3edf6"]
    colors = [shades[index % len(shades)] for index in range(len(ends))]
    names = [f"gateway {index + 1}" for index in range(len(ends))]
    axes.hist(ends, bins=edges.tolist(), stacked=True, color=colors, label=names, rwidth=0.92)
    if plot.outage is not None:
        axes.axvspan(plot.outage.began, plot.outage.ended, color="#f6dedb", linewidth=0, zorder=0)
        number = list(plot.urls).index(plot.outage.url) + 1
        axes.annotate(
            f"gateway {number} down",
            (plot.outage.began, 0.87),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            color="#c0392b",
        )
    axes.set(
        title="A gateway is killed: turns answered by gateway",
        xlabel="seconds since the start of a second replay",
        ylabel="turns",
    )
    axes.set_xlim(0, run.wall_seconds + width)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    axes.legend(loc="upper right", ncols=len(ends))
