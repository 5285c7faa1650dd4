"""Tables of a calibration's result."""

from collections.abc import Iterator, Mapping
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from dps_gateway.pool import Pool
from dps_lab.calibrate.goal import OBJECTIVE_NAMES
from dps_lab.calibrate.measure import EngineMeasurement
from dps_lab.calibrate.result import FLAT, Calibration
from dps_lab.calibrate.setup import Measurement, Setup

SPECULATES_ABOVE: Final = 1.05
"""Mean tokens per decode step from which an engine is assumed to speculate."""


def print_calibration(result: Calibration, title: str, console: Console) -> None:
    """Print the choice and its alternatives, how flat the optimum is, and whether two pools are worthwhile."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in ("", "engines", "policy, τ"):
        table.add_column(column)
    for column in ("session", "TTFT p95", "TPOT", "batch", "loss"):
        table.add_column(column, justify="right")
    table.columns[2].no_wrap = True
    table.add_row("choice", *_columns(result.choice, result.figures), "", style="bold")
    for each in result.alternatives:
        table.add_row(
            each.name.split()[0] if each.setup.two_pools else each.name,
            *_columns(each.setup, each.figures),
            f"{each.loss:+.1%}",
        )
    console.print(table)
    for line in _lines(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_measurements(pools: Mapping[Pool, EngineMeasurement], console: Console) -> None:
    """Print what was measured on running engines."""
    table = Table(title="Measured engines", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in ("", "prefill", "decode step", "tokens per step", "outside the passes", "requests"):
        table.add_column(column)
    for pool, each in pools.items():
        passes = each.passes
        table.add_row(
            pool,
            f"{_milliseconds(passes.prefill_base_seconds)} + "
            f"{_milliseconds(1000 * passes.prefill_seconds_per_token)} per 1,000 tokens",
            f"{_milliseconds(passes.decode_base_seconds)} + "
            f"{_milliseconds(passes.decode_seconds_per_request)} per request",
            f"{each.acceptance_length:.2f}",
            _milliseconds(each.request_seconds),
            "one at a time" if each.serialized else "batched",
        )
    console.print(table)
    if pools[Pool.GREEDY].acceptance_length > SPECULATES_ABOVE:
        console.print("The greedy engines send several tokens per step: check that they do not speculate.")
    if pools[Pool.SPECULATIVE].acceptance_length < SPECULATES_ABOVE:
        console.print("The speculative engines accept almost no drafts: check their speculation.")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def _columns(setup: Setup, figures: Measurement) -> tuple[str, ...]:
    threshold = "" if setup.threshold_tokens is None else f", {setup.threshold_tokens:,}"
    return (
        f"{setup.speculative} + {setup.greedy}",
        f"{setup.policy}{threshold}" if setup.two_pools else "",
        f"{figures.session_median:,.3f}",
        f"{figures.ttft_p95:,.3f}",
        f"{figures.tpot_median:.4f}",
        f"{figures.batch:,.1f}",
    )


def _lines(result: Calibration) -> Iterator[str]:
    yield (
        "Engines: speculative + greedy. Times are in seconds, medians unless stated. Loss: relative increase of the "
        "minimised figure over the choice's."
    )
    yield f"Minimised: {OBJECTIVE_NAMES[result.goal.objective]}; {result.runs} simulations."
    if result.excess:
        yield (
            "No set-up meets the limits. The choice comes closest: it exceeds one of them by "
            f"{result.excess:.1%}."
        )
    if result.flatness is not None:
        flat = result.flatness
        yield (
            f"With the same engines and policy, τ from {flat.lowest_tokens:,} to {flat.highest_tokens:,} tokens "
            f"is within {FLAT:.0%} of the choice ({flat.tried} values tried)."
        )
    yield result.verdict()
