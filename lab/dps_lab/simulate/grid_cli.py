"""`make grid`: compare the policy `Adaptive` with static policies and other fleets in simulations. Takes hours."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from dps_lab.arguments import positive_int
from dps_lab.simulate.grid import (
    ADAPTIVE,
    CHANGES,
    CONCURRENCIES,
    Comparison,
    SetUp,
    Times,
    compare,
    compare_after,
    compare_with_change,
    mean_over_seeds,
    repeat,
    repeat_best,
    sample,
    set_ups,
)
from dps_lab.simulate.options import add_replicas_option
from dps_lab.simulate.workloads import WORKLOADS, load_workload

TOLERANCE = 0.02
"""Maximum excess over the best static policy with which a set-up is counted in the summary."""

CHANGE_SESSIONS = 3_200
"""Sessions for a set-up that changes: enough to last until the turns that are compared."""


def main(argv: list[str] | None = None) -> int:
    """Simulate the grid and print it as a Markdown table. Always returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m dps_lab.simulate.grid_cli",
        description=(
            "Compare the policy Adaptive on one speculative and one greedy engine with every static policy on the "
            "same engines, and with two engines of one kind. Times are in seconds: the batch time / the median session "
            "latency / the mean session latency. The column frontier has the batch time / the median of each static "
            "policy for which no other one is at least as good in both."
        ),
        epilog="docs/adaptive-evaluation.md explains the results.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        default=list(WORKLOADS),
        metavar="NAME|FILE",
        help="workloads to simulate (default: all bundled ones)",
    )
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=positive_int,
        default=CONCURRENCIES,
        metavar="C",
        help="numbers of concurrent sessions (default: 1 to 64)",
    )
    parser.add_argument(
        "--seed",
        nargs="+",
        type=int,
        default=[0],
        metavar="S",
        help="seeds, over which the times are means (default: 0)",
    )
    parser.add_argument(
        "--sessions", type=positive_int, default=120, metavar="N", help="number of sessions (default: 120)"
    )
    add_replicas_option(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--changes", action="store_true", help="instead, change the load or an engine during the simulation"
    )
    mode.add_argument(
        "--chance",
        action="store_true",
        help="instead, simulate the best static policies again with other random numbers",
    )
    options = parser.parse_args(argv)
    if options.chance:
        _print_chance(options)
    elif options.changes:
        _print_changes(options.workload, options.seed, options.replicas)
    else:
        _print_grid(options)
    return 0


def _print_grid(options: argparse.Namespace) -> None:
    print(
        "| workload | cache | speculation | c | Adaptive | best static policy | excess "
        "| greedy=2 | speculative=2 | frontier |"
    )
    print("| :-- | :-- | :-- | --: | --: | --: | --: | --: | --: | :-- |")
    done: list[Comparison] = []
    for set_up in set_ups(options.workload, options.concurrency, options.seed[:1], options.replicas):
        sessions = load_workload(set_up.workload)
        comparison = mean_over_seeds(
            [
                compare(sample(sessions, options.sessions, seed), replace(set_up, seed=seed))
                for seed in options.seed
            ]
        )
        done.append(comparison)
        print(_row(comparison), flush=True)
    _print_summary([each.excess for each in done])
    near_both = [each.near_both(TOLERANCE) for each in done]
    adaptive = sum(ADAPTIVE in names for names in near_both)
    static = sum(any(name != ADAPTIVE for name in names) for names in near_both)
    print(
        f"batch time and median session latency: both at most {TOLERANCE:.0%} above the best static policy for each in "
        f"{adaptive} of {len(done)} set-ups; one static policy has both in {static}",
        file=sys.stderr,
    )


def _print_chance(options: argparse.Namespace) -> None:
    """For each seed and set-up, the excess of the best static policies over themselves."""
    print("| workload | cache | speculation | c | seed | excess |")
    print("| :-- | :-- | :-- | --: | --: | --: |")
    done: list[Times] = []
    for set_up in set_ups(options.workload, options.concurrency, options.seed, options.replicas):
        sessions = sample(load_workload(set_up.workload), options.sessions, set_up.seed)
        excess = repeat_best(sessions, set_up)
        done.append(excess)
        values = (set_up.workload, set_up.cache, _speculation(set_up), set_up.concurrency, set_up.seed)
        print(f"| {' | '.join(map(str, values))} | {_excess(excess)} |", flush=True)
    _print_summary(done)


def _print_summary(excesses: Sequence[Times]) -> None:
    within = {
        "batch time": sum(each.batch <= TOLERANCE for each in excesses),
        "median session latency": sum(each.median <= TOLERANCE for each in excesses),
        "mean session latency": sum(each.mean <= TOLERANCE for each in excesses),
    }
    for name, count in within.items():
        print(
            f"{name}: at most {TOLERANCE:.0%} above the best static policy in {count} of {len(excesses)} set-ups",
            file=sys.stderr,
        )


def _row(comparison: Comparison) -> str:
    set_up, excess = comparison.set_up, comparison.excess
    static = comparison.static
    batch = min(static, key=lambda name: static[name].batch)
    median = min(static, key=lambda name: static[name].median)
    mean = min(static, key=lambda name: static[name].mean)
    values = (
        set_up.workload,
        set_up.cache,
        _speculation(set_up),
        set_up.concurrency,
        _times(comparison.adaptive),
        f"{static[batch].batch:.1f} ({batch}) / {static[median].median:.2f} ({median}) / "
        f"{static[mean].mean:.2f} ({mean})",
        _excess(excess),
        _times(comparison.fleets["greedy=2"]),
        _times(comparison.fleets["speculative=2"]),
        ", ".join(
            f"{static[name].batch:.1f} / {static[name].median:.2f} ({name})" for name in comparison.frontier
        ),
    )
    return f"| {' | '.join(map(str, values))} |"


def _print_changes(workloads: Sequence[str], seeds: Sequence[int], replicas: int) -> None:
    print(
        "| workload | cache | speculation | change | Adaptive | best static policy | excess | excess in the whole run |"
    )
    print("| :-- | :-- | :-- | :-- | --: | --: | --: | --: |")
    for set_up in set_ups(workloads, (0,), seeds[:1], replicas):
        sessions = load_workload(set_up.workload)
        times = -(-CHANGE_SESSIONS // len(sessions))
        for name, (concurrency, changes) in CHANGES.items():
            runs = [
                (
                    repeat(sample(sessions, len(sessions), seed), times),
                    replace(set_up, concurrency=concurrency, seed=seed),
                    changes,
                )
                for seed in seeds
            ]
            after = [compare_after(*run) for run in runs]
            means = {policy: fmean(each[policy] for each in after) for policy in after[0]}
            adaptive = means.pop(ADAPTIVE)
            best = min(means, key=means.__getitem__)
            values = (
                set_up.workload,
                set_up.cache,
                _speculation(set_up),
                name,
                f"{adaptive:.3f}",
                f"{means[best]:.3f} ({best})",
                f"{adaptive / means[best] - 1:+.1%}",
                _excess(mean_over_seeds([compare_with_change(*run) for run in runs]).excess),
            )
            print(f"| {' | '.join(map(str, values))} |", flush=True)


def _speculation(set_up: SetUp) -> str:
    return "serialized" if set_up.serialized else "batched"


def _excess(times: Times) -> str:
    return f"{times.batch:+.1%} / {times.median:+.1%} / {times.mean:+.1%}"


def _times(times: Times) -> str:
    return f"{times.batch:.1f} / {times.median:.2f} / {times.mean:.2f}"


if __name__ == "__main__":
    sys.exit(main())
