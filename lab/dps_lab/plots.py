"""Plots of replays as PNG files. DPS, greedy and speculative have the same colour in every panel."""

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
from matplotlib.typing import RcKeyType

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

    runs: DPS, greedy and always speculative, in this order.
    threshold_tokens: τ of DPS.
    time_scale: as in `summarize`. The timeline and the outage stay in real seconds.
    urls: the gateways' base URLs.
    """

    runs: Sequence[ReplayResult]
    threshold_tokens: int
    time_scale: float
    urls: Sequence[str]
    outage: Outage | None
    subtitle: str


def draw_demo(plot: DemoPlot, path: Path) -> None:
    """Write a PNG with four panels: ΔL by pool, session latency, throughput, and turns over time by gateway."""
    summaries = [summarize(run, plot.time_scale) for run in plot.runs]
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12, rect=(0, 0, 1, 0.91))
        figure = Figure(figsize=(11.5, 7.6), dpi=150, layout=layout)
        figure.text(0.014, 0.965, "Delta-Prefill Switching", fontsize=15, weight="bold", va="center")
        figure.text(0.014, 0.927, plot.subtitle, fontsize=9.5, color="#5b656e", va="center")
        axes = figure.subplots(2, 2)
        _deltas(axes[0, 0], plot.runs[0], plot.threshold_tokens)
        _latencies(axes[0, 1], plot.runs, plot.time_scale)
        _throughput(axes[1, 0], summaries)
        _timeline(axes[1, 1], plot)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


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
        title="Turns by prompt growth and pool",
        xlabel="ΔL: prompt growth since the previous turn, tokens (log scale)",
        ylabel="turns",
    )
    axes.legend(title="pool", loc="upper right", alignment="left")


def _log_bins(low: float, high: float, edge: float, ratio: float = 1.17) -> list[float]:
    """Bins of equal width on a logarithmic axis. No bin contains values on both sides of `edge`."""
    below, above = math.ceil(math.log(edge / low, ratio)), math.ceil(math.log(high / edge, ratio))
    return [edge * ratio**step for step in range(-max(below, 1), max(above, 1) + 1)]


def _latencies(axes: Axes, runs: Sequence[ReplayResult], scale: float) -> None:
    for run, color in zip(runs, (DPS, GREEDY, SPECULATIVE), strict=True):
        seconds = sorted(
            sum(record.latency for record in turns) * scale for turns in run.by_session().values()
        )
        share = np.arange(1, len(seconds) + 1) / max(1, len(seconds))
        axes.step(seconds, share, where="post", color=color, linewidth=2, label=run.label)
    axes.set(
        title="Session latency, cumulative",
        xlabel="seconds per session (sum over its turns)",
        ylabel="share of sessions",
        ylim=(0, 1.02),
    )
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.legend(loc="lower right")


def _throughput(axes: Axes, summaries: Sequence[Summary]) -> None:
    labels = [summary.label for summary in summaries]
    bars = axes.barh(
        labels, [s.tokens_per_second for s in summaries], color=[DPS, GREEDY, SPECULATIVE], height=0.58
    )
    axes.bar_label(
        bars,
        [
            f"{s.tokens_per_second:,.0f} tokens/s"
            + (f", median session {s.session_latency.median:.2f} s" if s.session_latency else "")
            for s in summaries
        ],
        padding=6,
    )
    axes.set_xlim(0, max([s.tokens_per_second for s in summaries], default=1.0) * 1.7 or 1.0)
    axes.invert_yaxis()
    axes.set(
        title="Throughput and median session latency", xlabel="generated tokens per second, all sessions"
    )
    axes.tick_params(axis="y", length=0)


def _timeline(axes: Axes, plot: DemoPlot) -> None:
    run = plot.runs[0]
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
        title="Turns answered over time, by gateway",
        xlabel="seconds since the start of the DPS run",
        ylabel="turns",
    )
    axes.set_xlim(0, run.wall_seconds + width)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    axes.legend(loc="upper right", ncols=len(ends))
