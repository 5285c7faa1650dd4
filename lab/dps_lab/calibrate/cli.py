"""`dps calibrate`: find the policy, the threshold and the split of the GPUs that suit a workload and a load."""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from dps_gateway.config import ConfigError
from dps_gateway.pool import Pool
from dps_lab.arguments import positive_float, positive_int
from dps_lab.calibrate.apply import apply, check, patch, recommendation
from dps_lab.calibrate.budget import Rule, find_rule
from dps_lab.calibrate.goal import OBJECTIVES, Goal
from dps_lab.calibrate.live import LIMIT_SECONDS, measure_engines
from dps_lab.calibrate.measure import EngineMeasurement, MeasurementError, Plan, measured_fleet
from dps_lab.calibrate.plot import draw_calibration
from dps_lab.calibrate.report import print_calibration, print_measurements
from dps_lab.calibrate.result import Calibration, conclude
from dps_lab.calibrate.search import Search, Thresholds
from dps_lab.calibrate.setup import Conditions
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
from dps_lab.simulate.run import Load
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import load_workload
from dps_local.running_engines import base_url

DEFAULT_SESSIONS: Final = 120
BUDGET_SESSIONS: Final = 2000
"""How many sessions are simulated to find the rule of a GPU budget, which needs a longer time than a fixed split."""
SEEDS: Final = 3
EXHAUSTIVE_THRESHOLDS: Final = 64


def main(argv: list[str]) -> int:
    """Calibrate and print the result. Returns 0, 1 if no set-up meets the limits, or 2 for invalid input."""
    options = command_line().parse_args(argv)
    try:
        if options.apply is not None:
            check(options.apply)
        measured = _measure(options)
        result, search, rule = _calibrate(options, measured)
        if options.plot is not None:
            draw_calibration(result, search.explored, options.workload, options.plot)
        if options.apply is not None and not result.excess:
            apply(result.choice, options.apply)
        if options.recommendation is not None and not result.excess:
            options.recommendation.write_text(recommendation(result, rule), encoding="utf-8")
    except (ValueError, FleetError, ConfigError, MeasurementError, OSError) as error:
        print(f"dps calibrate: {error}", file=sys.stderr)
        return 2
    budget = {} if rule is None else {"budget": asdict(rule)}
    if options.json:
        engines = {} if measured is None else {"engines": {pool: asdict(measured[pool]) for pool in measured}}
        print(json.dumps({**result.as_json(), **budget, **engines}))
    elif options.patch:
        if not result.excess:
            print(patch(result.choice), end="")
    else:
        console = Console()
        if measured is not None:
            print_measurements(measured, console)
        print_calibration(result, _title(options), console)
        if rule is not None:
            gain = f"load ratio {rule.load_ratio:g}, {rule.gain:.1%} better than with equal loads"
            console.print(f"Rule of the budget: {gain if rule.load_ratio != 1 else 'equal loads'}.")
    if result.excess:
        print("dps calibrate: no set-up meets the limits; nothing was applied", file=sys.stderr)
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
        epilog="docs/calibrate.md describes the search and its output.",
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
    live = parser.add_argument_group(
        "running engines",
        f"Measure the speed of these engines with {Plan().requests} requests each, instead of assuming --hardware. "
        "The measurement delays other requests.",
    )
    for pool in Pool:
        live.add_argument(
            f"--{pool}-url",
            type=base_url,
            action="append",
            default=[],
            metavar="URL",
            help=f"base URL of a {pool} engine; may be repeated",
        )
    live.add_argument("--api-key", metavar="KEY", help="the engines' key, sent as a bearer token")
    parser.add_argument(
        "--objective",
        choices=tuple(OBJECTIVES),
        default="session",
        help="what to minimise (default: session)",
    )
    for figure, name in _LIMITS.items():
        parser.add_argument(f"--max-{figure}", type=positive_float, metavar="SECONDS", help=f"maximum {name}")
    parser.add_argument(
        "--sessions",
        type=_sessions,
        default=DEFAULT_SESSIONS,
        metavar="N|all",
        help=f"how many of the workload's sessions to simulate (default: {DEFAULT_SESSIONS})",
    )
    add_replicas_option(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="first of the three seeds that are simulated (default: 0)",
    )
    parser.add_argument(
        "--exhaustive", action="store_true", help="try every split and policy with 64 thresholds"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the result to this PNG file")
    parser.add_argument(
        "--apply",
        type=Path,
        metavar="FILE",
        help="set the policy and the threshold in this configuration file of the gateway",
    )
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


_LIMITS: Final = {
    "session-p95": "95th percentile of the session latency",
    "ttft-p95": "95th percentile of the time to first token",
    "tpot": "median time per output token",
}


def _measure(options: argparse.Namespace) -> dict[Pool, EngineMeasurement] | None:
    """Measure the engines whose URLs are given; None if there are none. Raises MeasurementError."""
    urls = {Pool.SPECULATIVE: options.speculative_url, Pool.GREEDY: options.greedy_url}
    if not any(urls.values()):
        return None
    if not all(urls.values()):
        raise ValueError("set both --speculative-url and --greedy-url; engines of both kinds are compared")
    if options.time_model == "emulated":
        raise ValueError(
            "--time-model emulated and the URLs of engines exclude each other; remove one of them"
        )
    plan = Plan()
    print(
        f"dps calibrate: each engine receives {plan.requests} requests, up to {max(plan.batches)} at the same time, "
        f"for at most {LIMIT_SECONDS:g} s; they delay other requests",
        file=sys.stderr,
    )
    return asyncio.run(measure_engines(urls, options.api_key, plan))


def _calibrate(
    options: argparse.Namespace, measured: Mapping[Pool, EngineMeasurement] | None
) -> tuple[Calibration, Search, Rule | None]:
    workload = load_workload(options.workload)
    load = load_of(options, workload)
    sessions = sample(workload, options.sessions, load, options.seed)
    if (options.objective == "tpot" or options.max_tpot) and not any(
        _has_second_token(each) for each in sessions
    ):
        raise ValueError(
            "no answer has more than one token, so there is no time per token after the first; choose another "
            "--objective, and remove --max-tpot"
        )
    splits, engines = _splits(options)
    fleet = replace(fleet_of(options, dict.fromkeys(Pool, 1)), one_gpu=options.one_gpu)
    if measured is not None:
        fleet = measured_fleet(fleet, measured, options.acceptance_length)
    conditions = Conditions(sessions, load, fleet, options.replicas)
    given = {name: getattr(options, f"max_{name.replace('-', '_')}") for name in _LIMITS}
    goal = Goal(options.objective, tuple((name, limit) for name, limit in given.items() if limit is not None))
    seeds = range(options.seed, options.seed + SEEDS)
    search = Search(conditions.measure, Thresholds.of(sessions), goal, seeds)
    finalists = (
        search.run_exhaustively(splits, engines, EXHAUSTIVE_THRESHOLDS)
        if options.exhaustive
        else search.run(splits, engines)
    )
    result = conclude(search, goal, finalists, alone=1 if options.one_gpu else engines)
    if options.budget is None:
        return result, search, None
    moving = replace(conditions, sessions=sample(workload, BUDGET_SESSIONS, load, options.seed))
    return result, search, find_rule(moving, result.choice, options.cooldown, goal, seeds)


def _has_second_token(session: SessionTrace) -> bool:
    return any(turn.output_tokens > 1 for turn in session.turns)


def sample(
    workload: Sequence[SessionTrace], count: int | None, load: Load, seed: int
) -> Sequence[SessionTrace]:
    """`count` random sessions in their order, or the first to arrive if they arrive as recorded; all if None."""
    if count is None or count >= len(workload):
        return workload
    if load == Load():
        return sorted(workload, key=lambda session: session.arrival_seconds or 0.0)[:count]
    chosen = random.Random(f"{seed}/sample").sample(range(len(workload)), count)
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
