"""`dps simulate`: simulate a fleet under a routing policy and a load, in virtual time."""

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Final

from pydantic import TypeAdapter, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import POLICIES, policy_named
from dps_lab.arguments import number, positive_int
from dps_lab.simulate.adaptive_drafts import SGLANG_STEPS, StepsByBatch, vllm_steps
from dps_lab.simulate.compare import CONCURRENCIES, compare, comparison_tables, regret
from dps_lab.simulate.fleet import KINDS, FleetError, parse_fleet
from dps_lab.simulate.options import (
    add_engine_options,
    add_load_options,
    add_replicas_option,
    add_workload_option,
    fleet_of,
    load_of,
)
from dps_lab.simulate.report import Report, Spread, summarize
from dps_lab.simulate.run import Scenario, simulate
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import Mixture, load_workload, mixed

DEFAULT_THRESHOLD: Final = 128

_SCHEDULE: Final = TypeAdapter(list[tuple[int, int, int]])


def main(argv: list[str]) -> int:
    """Run a simulation and print its results. Returns 0, or 2 for invalid input."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.applications and options.acceptance is None:
            raise ValueError(
                "--applications needs their acceptance; add --acceptance, such as --acceptance 0.35=1,0.85=3"
            )
        workload = load_workload(options.workload)
        if options.compare:
            return _compare(options, workload)
        sessions = _with_acceptance(options, workload, options.acceptance, options.seed)
        scenario = _circumstances(options, workload, _scenario(options, sessions))
        results = simulate(sessions, scenario)
        report = summarize(results, scenario.fleet.gpus, regret(sessions, scenario, results))
    except (ValueError, FleetError) as error:
        print(f"dps simulate: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        Console().print(
            _table(report, f"{options.workload}: {len(sessions):,} sessions, {len(results):,} turns")
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dps simulate",
        description="Simulate a fleet of engines behind the gateway in virtual time. Requires no GPU.",
        epilog="docs/lab.md describes the workloads, the trace format and the time model.",
        allow_abbrev=False,
    )
    add_workload_option(parser)
    parser.add_argument(
        "--fleet",
        default="speculative=1,greedy=1",
        metavar=KINDS,
        help="engines by kind, each on its own GPU (default: speculative=1,greedy=1)",
    )
    parser.add_argument(
        "--draft-tokens-by-batch",
        type=_draft_tokens_by_batch,
        default=SGLANG_STEPS,
        metavar="JSON",
        help="draft tokens of adaptive engines by batch size, in the format of vLLM's "
        "num_speculative_tokens_per_batch_size, such as [[1,2,4],[3,64,1]] (default: SGLang's table)",
    )
    parser.add_argument("--one-gpu", action="store_true", help="all engines share one GPU's time and memory")
    parser.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        default="DeltaPrefill",
        help="routing policy of the gateway (default: DeltaPrefill)",
    )
    parser.add_argument(
        "--threshold",
        type=_threshold,
        default=DEFAULT_THRESHOLD,
        metavar="N",
        help="τ in tokens, or 'none' to send every turn to the speculative pool (default: %(default)s)",
    )
    add_load_options(parser)
    add_replicas_option(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the arrivals, the acceptance of drafts and random routing (default: 0)",
    )
    parser.add_argument(
        "--compare",
        nargs="?",
        type=_levels,
        const=CONCURRENCIES,
        metavar="C,C,...",
        help="compare fleets of two engines, and policies that route between one engine of each kind, at these numbers "
        f"of concurrent sessions (default: {','.join(map(str, CONCURRENCIES))}); --fleet, --policy and the load are "
        "not used",
    )
    parser.add_argument(
        "--seeds",
        type=positive_int,
        default=1,
        metavar="N",
        help="with --compare: print means over N seeds, from --seed on (default: 1)",
    )
    parser.add_argument(
        "--acceptance",
        type=_mixture,
        metavar="P[:P...][=SHARE],...",
        help="probability that a draft token is accepted if the previous ones were, and the share of the sessions that "
        "have it, such as 0.35=1,0.85=3; with 0.35:0.85, it changes in the middle of a session (default: that of the "
        "workload, or else the engines' acceptance length)",
    )
    parser.add_argument(
        "--applications",
        action="store_true",
        help="sessions of the same share of --acceptance have their own system prompt, from which the gateway "
        "recognises what is similar to a new session (default: nothing tells them apart)",
    )
    parser.add_argument(
        "--before",
        type=_mixture,
        metavar="P[=SHARE],...",
        help="Adaptive has served the same sessions before, with this acceptance; with --applications, its shares are "
        "those of the applications in the order of --acceptance (default: it knows nothing)",
    )
    parser.add_argument(
        "--no-reports",
        action="store_true",
        help="the engines do not report how many drafted tokens they accepted",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    return parser


def _scenario(options: argparse.Namespace, sessions: list[SessionTrace]) -> Scenario:
    load = load_of(options, sessions)
    engines, adaptive = parse_fleet(options.fleet)
    fleet = replace(
        fleet_of(options, engines),
        one_gpu=options.one_gpu,
        adaptive=adaptive,
        steps_by_batch=options.draft_tokens_by_batch,
    )
    if adaptive and not fleet.speculation.steps:
        raise FleetError(
            f"adaptive engines vary their draft steps, of which {options.algorithm} has none; choose another "
            "--algorithm, or speculative=N instead of adaptive=N"
        )
    if fleet.steps_by_batch is not SGLANG_STEPS and not adaptive:
        raise FleetError("--draft-tokens-by-batch requires adaptive engines, such as --fleet adaptive=2")
    policy = policy_named(options.policy, options.threshold)
    return Scenario(fleet, policy, load, seed=options.seed)


def _circumstances(options: argparse.Namespace, workload: list[SessionTrace], scenario: Scenario) -> Scenario:
    """The scenario with what the options say about the gateway's replicas and about their knowledge."""
    before = _with_acceptance(options, workload, options.before, scenario.seed) if options.before else ()
    return replace(scenario, replicas=options.replicas, reports=not options.no_reports, before=before)


def _with_acceptance(
    options: argparse.Namespace, workload: list[SessionTrace], mixture: Mixture | None, seed: int
) -> list[SessionTrace]:
    """The workload with these acceptance probabilities, or its own."""
    return workload if mixture is None else mixed(workload, mixture, seed, options.applications)


def _compare(options: argparse.Namespace, sessions: list[SessionTrace]) -> int:
    base = fleet_of(options, dict.fromkeys(Pool, 1))
    seeds = range(options.seed, options.seed + options.seeds)
    workload = partial(_with_acceptance, options, sessions, options.acceptance)
    change = partial(_circumstances, options, sessions)
    results = compare(workload, base, options.threshold, options.compare, seeds, change)
    if options.json:
        reports = {name: {each: asdict(by[each]) for each in by} for name, by in results.items()}
        print(json.dumps(reports))
        return 0
    title = f"{options.workload}: {len(sessions):,} sessions, {options.cache} cache, {options.speculation} speculation"
    Console().print(title, *comparison_tables(results, options.workload))
    return 0


def _threshold(text: str) -> int | None:
    """A threshold in tokens; None for 'none'. Raises ArgumentTypeError if the text is neither."""
    if text == "none":
        return None
    return number(text, int, "a number of tokens, at least 0, or 'none'", allow_zero=True)


def _levels(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def _mixture(text: str) -> dict[tuple[float, ...], float]:
    """Shares of the sessions by acceptance probability, such as `0.35=1,0.85:0.35=3`, or one for all sessions.

    Raises ArgumentTypeError if the text is neither.
    """
    shares: dict[tuple[float, ...], float] = {}
    try:
        for part in text.split(","):
            probabilities, _, share = part.partition("=")
            shares[tuple(map(float, probabilities.split(":")))] = float(share or 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    valid = all(0 <= probability <= 1 for probabilities in shares for probability in probabilities)
    if not valid or not all(0 < share < math.inf for share in shares.values()):
        raise argparse.ArgumentTypeError(
            f"'{text}' has a probability that is not from 0 to 1, or a share that is not above 0"
        )
    return shares


def _draft_tokens_by_batch(text: str) -> StepsByBatch:
    """The draft steps by batch. Raises ArgumentTypeError if the text is not a table of vLLM."""
    try:
        return vllm_steps(_SCHEDULE.validate_json(text))
    except ValidationError:
        problem = "not a JSON list of [first batch size, last batch size, draft tokens]"
    except ValueError as error:
        problem = str(error)
    raise argparse.ArgumentTypeError(f"{text}: {problem}")


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
