"""`dps calibrate`: find the policy, the threshold and the split of the GPUs that suit a workload and a load."""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import AlwaysGreedy
from dps_lab.arguments import positive_float, positive_int
from dps_lab.calibrate.report import Calibration, conclude
from dps_lab.calibrate.search import (
    LOAD_RATIOS,
    OBJECTIVES,
    SEEDS,
    Goal,
    Search,
    find_rule,
    measure,
    thresholds,
)
from dps_lab.simulate.fleet import Budget, FleetError, parse_fleet
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.options import (
    add_engine_options,
    add_load_options,
    add_replicas_option,
    add_workload_option,
    fleet_of,
    load_of,
)
from dps_lab.simulate.report import mean_of
from dps_lab.simulate.run import Load, Scenario
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import load_workload

DEFAULT_SESSIONS: Final = 120
BUDGET_SESSIONS: Final = 2000
"""How many sessions are simulated to find the rule of a GPU budget, which needs a longer time than a fixed split."""
LIMITS: Final = ("session-p95", "ttft-p95", "tpot")
"""The figures that a limit can be given for."""


def main(argv: list[str]) -> int:
    """Calibrate and print the result. Returns 0, 1 if no set-up meets the limits, or 2 for invalid input."""
    options = command_line().parse_args(argv)
    try:
        result = _calibrate(options)
        if options.recommendation is not None and not result.excess:
            options.recommendation.write_text(result.recommendation(), encoding="utf-8")
    except (ValueError, FleetError, OSError) as error:
        print(f"dps calibrate: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result.as_json()))
    elif not options.patch:
        result.print(_title(options), Console())
    elif not result.excess:
        print(result.patch(), end="")
    if result.excess:
        print("dps calibrate: no set-up meets the limits; nothing is recommended", file=sys.stderr)
        return 1
    return 0


def command_line() -> argparse.ArgumentParser:
    """The parser of the command line of `dps calibrate`."""
    parser = argparse.ArgumentParser(
        prog="dps calibrate",
        description=(
            "Find the routing policy, the threshold and the split of the GPUs that suit a workload and a load, "
            "by simulation. Requires no GPU."
        ),
        epilog="docs/lab.md describes the output.",
        allow_abbrev=False,
    )
    add_workload_option(parser)
    fleet = parser.add_mutually_exclusive_group()
    fleet.add_argument(
        "--gpus", type=positive_int, default=2, metavar="N", help="number of GPUs to split (default: 2)"
    )
    fleet.add_argument(
        "--fleet",
        metavar="speculative=N,greedy=M",
        help="number of engines of each kind, if the split is fixed",
    )
    fleet.add_argument(
        "--budget",
        type=_budget,
        metavar="N",
        help="number of engines that move between the pools, as with spec.gpuBudget of a DPSRouter",
    )
    parser.add_argument("--one-gpu", action="store_true", help="the engines of --fleet share one GPU")
    parser.add_argument(
        "--cooldown",
        type=positive_float,
        default=Budget().cooldown_seconds,
        metavar="SECONDS",
        help=f"with --budget: time between two moves (default: {Budget().cooldown_seconds:g})",
    )
    add_load_options(parser)
    parser.add_argument(
        "--objective",
        choices=tuple(OBJECTIVES),
        default="session",
        help="what to minimise (default: session)",
    )
    for figure in LIMITS:
        description = f"maximum {OBJECTIVES[figure][1]}"
        parser.add_argument(f"--max-{figure}", type=positive_float, metavar="SECONDS", help=description)
    parser.add_argument(
        "--sessions",
        type=_sessions,
        default=DEFAULT_SESSIONS,
        metavar="N|all",
        help=f"how many of the workload's sessions to simulate (default: {DEFAULT_SESSIONS})",
    )
    add_replicas_option(parser)
    parser.add_argument(
        "--recommendation",
        type=Path,
        metavar="FILE",
        help="write the result to this file as one JSON object, as in status.routing.recommended of a DPSRouter",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--patch", action="store_true", help="print a merge patch that applies the result to a DPSRouter"
    )
    add_engine_options(parser)
    return parser


def _calibrate(options: argparse.Namespace) -> Calibration:
    workload = load_workload(options.workload)
    load = load_of(options, workload)
    sessions = sample(workload, options.sessions, load)
    if (options.objective == "tpot" or options.max_tpot) and not any(
        turn.output_tokens > 1 for session in sessions for turn in session.turns
    ):
        raise ValueError(
            "no answer has more than one token, so there is no time per token after the first; choose another "
            "--objective, and remove --max-tpot"
        )
    splits, engines = _splits(options)
    fleet = replace(fleet_of(options, dict.fromkeys(Pool, 1)), one_gpu=options.one_gpu)
    base = Scenario(fleet, AlwaysGreedy(), load, options.replicas)
    limits = {name: getattr(options, f"max_{name.replace('-', '_')}") for name in LIMITS}
    goal = Goal(
        options.objective, tuple((name, limit) for name, limit in limits.items() if limit is not None)
    )
    search = Search(partial(measure, sessions, base), thresholds(sessions), goal)
    result = conclude(search, search.run(splits, engines), alone=1 if options.one_gpu else engines)
    if options.budget is None:
        return result
    sessions = sample(workload, BUDGET_SESSIONS, load)
    figures = {}
    for ratio in LOAD_RATIOS:
        moving = replace(base, fleet=replace(fleet, budget=Budget(options.cooldown, load_ratio=ratio)))
        figures[ratio] = mean_of([measure(sessions, moving, result.choice, seed) for seed in SEEDS])
    return replace(result, rule=find_rule(figures, goal))


def sample(workload: Sequence[SessionTrace], count: int | None, load: Load) -> Sequence[SessionTrace]:
    """`count` random sessions in their order, or the first to arrive if they arrive as recorded; all if None."""
    if count is None or count >= len(workload):
        return workload
    if load == Load():
        return sorted(workload, key=lambda session: session.arrival_seconds or 0.0)[:count]
    chosen = random.Random("sample").sample(range(len(workload)), count)
    return [workload[index] for index in sorted(chosen)]


def _splits(options: argparse.Namespace) -> tuple[list[int], int]:
    """The numbers of speculative engines to try, and the number of all engines."""
    if options.fleet is not None:
        engines, adaptive = parse_fleet(options.fleet)
        if adaptive:
            raise FleetError(
                "adaptive engines are not searched; compare fleets that have them with dps simulate"
            )
        return [engines[Pool.SPECULATIVE]], sum(engines.values())
    if options.one_gpu:
        raise ValueError(
            "--one-gpu requires the engines that share the GPU; add --fleet speculative=1,greedy=1"
        )
    if options.budget is not None:
        return list(range(1, options.budget)), options.budget
    each = HARDWARE[options.hardware].tensor_parallel
    if options.gpus % each:
        raise ValueError(
            f"--gpus {options.gpus}: an engine of {options.hardware} takes {each} GPUs; choose a multiple of {each}"
        )
    engines_count = options.gpus // each
    return list(range(engines_count + 1)), engines_count


def _title(options: argparse.Namespace) -> str:
    if options.concurrency is not None:
        load = f"{options.concurrency} concurrent sessions"
    elif options.rate is not None:
        load = f"{options.rate:g} sessions per second"
    else:
        load = "sessions as recorded"
    return f"{options.workload}, {load}"


def _budget(text: str) -> int:
    engines = positive_int(text)
    if engines < 2:
        raise argparse.ArgumentTypeError("must be at least 2, because each pool has an engine")
    return engines


def _sessions(text: str) -> int | None:
    return None if text == "all" else positive_int(text)
