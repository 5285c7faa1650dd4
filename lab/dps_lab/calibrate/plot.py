"""A plot of a calibration as a PNG file: the objective by split and by threshold."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dps_lab.calibrate.goal import OBJECTIVE_NAMES, Goal
from dps_lab.calibrate.result import Calibration
from dps_lab.calibrate.setup import THRESHOLD_POLICIES, Measurement, Setup
from dps_lab.plots import DPS, FAINT, GREEDY, INK, SPECULATIVE, STYLE

_COLORS = {"DeltaPrefill": DPS, "TotalLength": "#6a3d9a"}


def draw_calibration(
    result: Calibration, explored: Mapping[Setup, Measurement], subtitle: str, path: Path
) -> None:
    """Write a PNG with two panels: the best result of every split, and the result of every threshold tried.

    explored: every simulated set-up with its figures for the first seed.
    """
    values = {setup: result.goal.value(figures) for setup, figures in explored.items()}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 4.2), dpi=150, layout="constrained")
        figure.suptitle(f"{_capitalized(result.goal)}, {subtitle}", x=0.01, ha="left")
        left, right = figure.subplots(1, 2)
        _splits(left, values, result.choice)
        _thresholds(right, values, result.choice)
        for axes in (left, right):
            axes.set_ylabel("seconds")
            axes.grid(axis="y", color=FAINT, linewidth=0.6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _splits(axes: Axes, values: Mapping[Setup, float], choice: Setup) -> None:
    """One bar for each number of speculative engines: the best result with it."""
    best: dict[int, float] = {}
    for setup, value in values.items():
        best[setup.speculative] = min(value, best.get(setup.speculative, value))
    splits = sorted(best)
    colors = [DPS if split == choice.speculative else GREEDY for split in splits]
    bars = axes.bar([str(split) for split in splits], [best[split] for split in splits], color=colors)
    axes.bar_label(bars, fmt="{:,.3g}", padding=3)
    axes.margins(y=0.15)
    engines = choice.speculative + choice.greedy
    axes.set(title="Best result of every split", xlabel=f"speculative engines, of {engines}")


def _thresholds(axes: Axes, values: Mapping[Setup, float], choice: Setup) -> None:
    """One line for each policy with a threshold, on the chosen split, or on the best split with two pools."""
    mixed = [setup for setup in values if setup.policy in THRESHOLD_POLICIES]
    axes.set(title="Result by threshold", xlabel="τ, tokens (log scale)", xscale="log")
    for pool, color in ((0, GREEDY), (choice.speculative + choice.greedy, SPECULATIVE)):
        single = next((value for setup, value in values.items() if setup.speculative == pool), None)
        if single is not None:
            label = "greedy only" if pool == 0 else "always speculative"
            axes.axhline(single, color=color, linestyle=(0, (4, 3)), label=label)
    if mixed:
        split = choice if choice.policy in THRESHOLD_POLICIES else min(mixed, key=values.__getitem__)
        for policy in THRESHOLD_POLICIES:
            line = sorted(
                (setup.threshold_tokens or 1, values[setup])
                for setup in mixed
                if (setup.policy, setup.fleet) == (policy, split.fleet)
            )
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, color=_COLORS[policy], label=policy)
        axes.set_title(f"Result by threshold, {split.speculative} + {split.greedy} engines")
    if choice in mixed:
        axes.plot([choice.threshold_tokens or 1], [values[choice]], "o", color=INK, label="choice")
    axes.legend()


def _capitalized(goal: Goal) -> str:
    name = OBJECTIVE_NAMES[goal.objective]
    return name[0].upper() + name[1:]
