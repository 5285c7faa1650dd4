"""`python -m dps_lab.calibrate.budget_day`: a GPU budget against fixed splits, on a day whose mix of sessions changes.

Sessions with short turns, which are decoded speculatively, arrive mostly by day; sessions with long turns, which are
not, mostly by night. The rule of the budget is to keep one of the load ratios that `dps calibrate` compares.
docs/simulation-results.md has the results.
"""

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import DeltaPrefill
from dps_lab.calibrate.budget import LOAD_RATIOS
from dps_lab.calibrate.setup import Measurement
from dps_lab.simulate.arrivals import DAILY_SWING
from dps_lab.simulate.fleet import Budget, FleetSpec
from dps_lab.simulate.run import Load, Scenario, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import load_workload

GPUS: Final = 4
THRESHOLD: Final = 128
BUDGET: Final = Budget(cooldown_seconds=120.0, start_seconds=60.0)
"""For a day of an hour; they are scaled to the length of the day."""


def day(
    by_day: Sequence[SessionTrace],
    by_night: Sequence[SessionTrace],
    rates: tuple[float, float],
    seconds: float,
    seed: int = 0,
) -> list[SessionTrace]:
    """Sessions of both workloads, drawn at random. The day begins and ends at midnight.

    rates: mean arrivals per second of each workload, which vary by the factor DAILY_SWING in opposite directions.
    """
    rng = random.Random(seed)
    sessions: list[SessionTrace] = []
    for name, source, rate, sign in (("day", by_day, rates[0], -1), ("night", by_night, rates[1], 1)):
        for number, arrival in enumerate(_arrivals(rate, sign, seconds, rng)):
            changes = {"id": f"{name}-{number}", "arrival_seconds": arrival}
            sessions.append(rng.choice(source).model_copy(update=changes))
    return sorted(sessions, key=lambda session: session.arrival_seconds or 0.0)


def _arrivals(rate: float, sign: int, seconds: float, rng: random.Random) -> Iterator[float]:
    """An inhomogeneous Poisson process, by thinning: a part of the arrivals at the highest rate is kept."""
    highest = rate * (1 + DAILY_SWING)
    now = rng.expovariate(highest)
    while now < seconds:
        if rng.random() * highest < rate * (1 + sign * DAILY_SWING * math.cos(2 * math.pi * now / seconds)):
            yield now
        now += rng.expovariate(highest)


def split(speculative: int, budget: Budget | None = None) -> FleetSpec:
    """A fleet with a number of speculative engines, and greedy ones on the other GPUs."""
    return FleetSpec({Pool.SPECULATIVE: speculative, Pool.GREEDY: GPUS - speculative}, budget=budget)


def run(sessions: Sequence[SessionTrace], fleet: FleetSpec) -> list[TurnResult]:
    """All turns of the day."""
    return simulate(sessions, Scenario(fleet, DeltaPrefill(THRESHOLD), Load()))


def main(argv: list[str]) -> int:
    """Print the table. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m dps_lab.calibrate.budget_day", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the day (default: 300)")
    parser.add_argument(
        "--rates",
        type=float,
        nargs=2,
        default=(11.0, 5.0),
        metavar=("DAY", "NIGHT"),
        help="mean arrivals per second of bfcl and of toolbench (default: 11 and 5)",
    )
    options = parser.parse_args(argv)
    rates = (options.rates[0], options.rates[1])
    sessions = day(load_workload("bfcl"), load_workload("toolbench"), rates, options.seconds)
    table = Table(box=box.SIMPLE_HEAD, title=f"{len(sessions):,} sessions", title_justify="left")
    for column in ("speculative + greedy", "session, median", "p95", "first token, median", "p95"):
        table.add_column(column, justify="right")
    scale = options.seconds / 3600.0

    def measure(name: str, fleet: FleetSpec) -> None:
        found = Measurement.of(run(sessions, fleet))
        values = (found.session_median, found.session_p95, found.ttft_median, found.ttft_p95)
        table.add_row(name, *(f"{value:.2f} s" for value in values))

    for count in range(1, GPUS):
        measure(f"{count} + {GPUS - count}", split(count))
    for ratio in LOAD_RATIOS:
        budget = Budget(scale * BUDGET.cooldown_seconds, scale * BUDGET.start_seconds, ratio)
        measure(f"budget, load ratio {ratio:g}", split(GPUS // 2, budget))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
