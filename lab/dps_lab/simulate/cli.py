"""`dps simulate`: simulate a fleet under a routing policy and a load, in virtual time."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Final, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from dps_gateway.routing.policies import POLICIES, policy_named
from dps_lab.simulate.fleet import FleetError, FleetSpec, parse_fleet
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.regret import regret
from dps_lab.simulate.report import Report, Spread, summarize
from dps_lab.simulate.roofline import speculation
from dps_lab.simulate.run import Load, Scenario, simulate
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import WORKLOADS, load_workload
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS

DEFAULT_THRESHOLD: Final = 128

Number = TypeVar("Number", int, float)


def main(argv: list[str]) -> int:
    """Run a simulation and print its results. Returns 0, or 2 for invalid input."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        sessions = load_workload(options.workload)
        scenario = _scenario(options, sessions)
        results = simulate(sessions, scenario)
        report = summarize(results, scenario.fleet.gpus, regret(sessions, scenario, results))
    except (ValueError, FleetError) as error:
        print(f"dps simulate: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        Console().print(
            _table(report, f"{options.workload}: {len(sessions):,} sessions, {len(results):,} turns")
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dps simulate",
        description="Simulate a fleet of engines behind the gateway in virtual time. Requires no GPU.",
        epilog="docs/simulate.md describes the workloads, the trace format and the time model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workload", required=True, metavar="NAME|FILE", help=f"{', '.join(WORKLOADS)}, or a JSONL trace"
    )
    parser.add_argument(
        "--fleet",
        default="speculative=1,greedy=1",
        metavar="speculative=N,greedy=M",
        help="engines by kind, each on its own GPU (default: speculative=1,greedy=1)",
    )
    parser.add_argument("--one-gpu", action="store_true", help="all engines share one GPU's time and memory")
    parser.add_argument(
        "--cache",
        choices=("separate", "common"),
        default="separate",
        help="whether an engine can fetch the prefixes that another one has cached (default: separate)",
    )
    parser.add_argument("--policy", choices=tuple(POLICIES), default="DeltaPrefill")
    parser.add_argument(
        "--threshold",
        type=_threshold,
        default=DEFAULT_THRESHOLD,
        metavar="N",
        help="τ in tokens, or 'none' to send every turn to the speculative pool (default: %(default)s)",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=_positive_int, metavar="C", help="closed loop: C concurrent sessions"
    )
    load.add_argument(
        "--rate", type=_positive_float, metavar="R", help="Poisson arrivals: R sessions per second"
    )
    parser.add_argument(
        "--speculation",
        choices=("batched", "serialized"),
        default="batched",
        help="serialized: a speculative engine runs requests one after another, as in the paper (default: batched)",
    )
    parser.add_argument("--replicas", type=_positive_int, default=1, metavar="N", help="gateway replicas")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    engine = parser.add_argument_group("engines")
    engine.add_argument("--hardware", choices=tuple(HARDWARE), default="a100-7b", help="default: a100-7b")
    engine.add_argument(
        "--algorithm", choices=sorted(SPECULATION_DEFAULTS), default="STANDALONE", help="default: STANDALONE"
    )
    engine.add_argument(
        "--acceptance-length",
        type=_positive_float,
        metavar="TOKENS",
        help="mean tokens that one verification yields (default: the algorithm's)",
    )
    engine.add_argument(
        "--transfer-rate",
        type=_positive_float,
        default=20.0,
        metavar="GB/S",
        help="bandwidth of fetches from a common cache, in GB/s (default: 20)",
    )
    return parser


def _scenario(options: argparse.Namespace, sessions: list[SessionTrace]) -> Scenario:
    load = Load(options.concurrency, options.rate)
    if load == Load():
        missing = next((session.id for session in sessions if session.arrival_seconds is None), None)
        if missing is not None:
            raise ValueError(
                f"session '{missing}' has no arrival_seconds; give --concurrency C or --rate R, or add "
                "arrival_seconds to every session"
            )
    fleet = FleetSpec(
        engines=parse_fleet(options.fleet),
        one_gpu=options.one_gpu,
        cache=options.cache,
        serialized=options.speculation == "serialized",
        hardware=HARDWARE[options.hardware],
        speculation=speculation(options.algorithm, options.acceptance_length),
        transfer_bytes_per_second=options.transfer_rate * 1e9,
    )
    policy = policy_named(options.policy, options.threshold)
    return Scenario(fleet, policy, load, options.replicas, options.seed)


def _table(report: Report, title: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        ("whole batch", f"{report.batch_seconds:,.1f} s"),
        ("GPUs", f"{report.gpus}"),
        ("session latency, median / p95", _spread(report.session_seconds)),
        ("time to first token, median / p95", _spread(report.time_to_first_token_seconds)),
        ("output tokens per second", f"{report.tokens_per_second:,.1f}"),
        ("speculative turns", f"{report.speculative_share:.1%}"),
        ("turns that changed pools", f"{report.moved_share:.1%}"),
        ("regret against the best static policy", f"{report.regret:.1%}"),
    ):
        table.add_row(name, value)
    return table


def _spread(spread: Spread) -> str:
    return f"{spread.median:,.3f} / {spread.p95:,.3f} s"


def _threshold(text: str) -> int | None:
    if text == "none":
        return None
    return _number(text, int, "a number of tokens, at least 0, or 'none'", allow_zero=True)


def _positive_int(text: str) -> int:
    return _number(text, int, "a whole number above 0")


def _positive_float(text: str) -> float:
    return _number(text, float, "a number above 0")


def _number(text: str, parse: Callable[[str], Number], expected: str, allow_zero: bool = False) -> Number:
    try:
        value = parse(text)
        if 0 < value < float("inf") or (allow_zero and value == 0):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not {expected}")
