"""`python -m dps_lab.bench`: compare the performance of the gateway and of other routers. Prints Markdown."""

import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from dps_gateway.prompt.tokenizer import Tokenizer
from dps_lab.bench import footprint, metrics, peers, runner, scale, table, tracing
from dps_lab.bench.processes import StartError
from dps_lab.bench.summary import Round, summarise
from dps_lab.bench.traffic import Content, TrafficPattern
from dps_lab.bench.wire import WireError
from dps_local import assets

_COUNTERS = (
    "dps_route_decisions_total",
    "dps_history_total",
    "dps_token_count_mismatch_total",
    "dps_state_errors_total",
    "dps_state_degraded",
)


def main() -> int:
    """Run the benchmark. Returns 0, or 1 if a router or another process cannot be run."""
    arguments = runner.options("make bench", __doc__)
    try:
        run(arguments.rounds, arguments.seconds, assets.qwen_tokenizer())
    except (StartError, WireError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 1
    return 0


def run(rounds: int, seconds: float, tokenizer: assets.Asset) -> None:
    """Measure all traffic patterns, and print the report."""
    began = time.monotonic()
    peers_python = peers.install_peers(assets.cache_dir())
    count = Tokenizer.load(str(tokenizer.path)).count
    results: dict[TrafficPattern, dict[str, list[Round]]] = {pattern: {} for pattern in runner.PATTERNS}
    low: dict[Content, list[runner.LowLoad]] = {content: [] for content in runner.CONTENTS}
    with (
        tempfile.TemporaryDirectory(prefix="dps-bench-") as directory,
        runner.started(
            Path(directory),
            count,
            lambda upstreams, redis_port: peers.contenders(
                Path(directory), upstreams, redis_port, tokenizer.path, peers_python
            ),
        ) as bench,
    ):
        for number in range(rounds):
            _progress(f"round {number + 1} of {rounds}, {time.monotonic() - began:.0f} s")
            for content in runner.CONTENTS:
                low[content].append(runner.measure_low_load(bench, content, number))
            for pattern in runner.PATTERNS:
                for name, measured in runner.measure_throughput(bench, pattern, number, seconds).items():
                    results[pattern].setdefault(name, []).append(measured)
        samples = metrics.scrape(bench.gateway_admin_port)
    order = [contender.name for contender in bench.contenders]
    print(_heading(rounds, seconds, tokenizer.description, time.monotonic() - began))
    for pattern, measured_rounds in results.items():
        print(
            table.throughput(pattern, summarise({name: measured_rounds[name] for name in order})), end="\n\n"
        )
    compared = (peers.VLLM_CACHE_AWARE, peers.VLLM)
    ratios = {
        pattern: [summarise(rounds, other)[peers.GATEWAY].ratio for other in compared]
        for pattern, rounds in results.items()
    }
    print(f"### Ratios\n\n{table.ratios(ratios, compared)}\n")
    added = {content: runner.spread_of_added(each) for content, each in low.items()}
    overhead = {content: runner.overhead(each) for content, each in low.items()}
    print(f"### One connection, non-streaming\n\n{table.added_time(added, overhead)}\n")
    for counter in _COUNTERS:
        print(table.counts(counter, metrics.rise({}, samples, counter)))
    print(f"\n{scale.measure(tokenizer, scale.Scale())}")
    print(f"\n{footprint.measure(tokenizer)}")
    print(f"\n{tracing.measure(rounds, seconds, tokenizer)}")


def _heading(rounds: int, seconds: float, tokenizer: str, took: float) -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "uvloop", "redis", "fastokens"))
    return (
        f"## make bench\n\n{rounds} rounds of at most {seconds:g} s, {runner.CONNECTIONS} connections, "
        f"each router on one core of {platform.machine()}; {', '.join(peers.REQUIREMENTS)}; "
        f"Python {platform.python_version()}, {libraries}; {tokenizer}. {took:.0f} s in all.\n"
    )


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
