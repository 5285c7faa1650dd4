"""`python -m dps_lab.bench.scale`: long requests, many long streams, and two workers. Prints Markdown.

`make bench` includes these measurements. They have fewer rounds than its other tables, because each takes longer.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from dps_gateway.client_connections import raise_file_limit
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_lab.bench import peers, runner, table
from dps_lab.bench.peers import Contender
from dps_lab.bench.processes import StartError, cpu_seconds
from dps_lab.bench.runner import Bench
from dps_lab.bench.summary import Round, summarise
from dps_lab.bench.traffic import Content, Traffic, TrafficPattern, traffic
from dps_lab.bench.wire import WireError
from dps_local import assets

OVERLOADED: Final[Mapping[str, Mapping[str, object]]] = {
    "limits": {"maxInFlightPerReplica": 4096},
    "timeouts": {"connectSeconds": 60},
}
"""The gateway's configuration for thousands of concurrent requests. By default, it queues requests once each engine has
256, and gives up connecting after a few seconds. An engine that shares a core with the load generator may take longer
than that to accept thousands of connections."""

WORKER_PATTERNS: Final = tuple(TrafficPattern(stream, Content(4096, "growing")) for stream in (False, True))
ONE, TWO = "one worker", "two workers"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int = 2
    """Rounds of every measurement but the streams, which have one."""
    body_bytes: int = 220 * 1024
    sessions: int = 160
    """Sessions, each of which sends one of these bodies for each number of connections."""
    concurrency: tuple[int, ...] = (20, 50, 150)
    """Connections that send long bodies."""
    streams: tuple[int, ...] = (500, 2000)
    """Numbers of concurrent streams."""
    chunks: int = 512


@dataclass(frozen=True)
class Sample:
    """The results of one contender. Times are in seconds; `cpu` is the router's CPU time per request."""

    rate: float
    latencies: list[float]
    first_byte: list[float]
    cpu: float


Samples = dict[str, list[Sample]]
"""By contender, one for each round that did not fail."""


def main() -> int:
    """Run the benchmark. Returns 0, or 1 if a process cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m dps_lab.bench.scale", description=__doc__)
    parser.add_argument("--rounds", type=int, default=Scale.rounds, metavar="N", help="number of rounds")
    try:
        print(measure(assets.qwen_tokenizer(), Scale(rounds=parser.parse_args().rounds)))
    except (StartError, WireError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"scale: {error}", file=sys.stderr)
        return 1
    return 0


def measure(tokenizer: assets.Asset, scale: Scale, *, rust: bool = True) -> str:
    """Measure and return the report. `rust`: whether to measure the routers from PyPI as well.

    Raises StartError, WireError, RuntimeError if there are too few cores, or CalledProcessError if PyPI is unreachable.
    """
    raise_file_limit()
    count = Tokenizer.load(str(tokenizer.path)).count
    python = peers.install_peers(assets.cache_dir()) if rust else None
    with tempfile.TemporaryDirectory(prefix="dps-bench-") as folder:
        directory = Path(folder)

        def routers(upstreams: list[str], redis_port: int) -> list[Contender]:
            return [
                peers.gateway(directory, upstreams, redis_port, tokenizer.path, sections=OVERLOADED),
                *(peers.rust_routers(python, upstreams) if python is not None else ()),
                peers.bare_proxy(upstreams),
            ]

        def one_and_two(upstreams: list[str], redis_port: int) -> list[Contender]:
            return [
                peers.gateway(directory, upstreams, redis_port, tokenizer.path, name, workers=number)
                for number, name in ((1, ONE), (2, TWO))
            ]

        with runner.started(directory, count, routers) as bench:
            parts = [*long_bodies(bench, scale), *long_streams(bench, scale)]
        with runner.started(directory, count, one_and_two) as bench:
            parts.append(workers(bench, scale))
    return "\n\n".join(parts)


def long_bodies(bench: Bench, scale: Scale) -> Iterator[str]:
    """The tables of requests with long bodies. Each is the next turn of a session, as agents send them."""
    pattern = TrafficPattern(False, Content(scale.body_bytes, "growing"))
    results: dict[int, Samples] = {each: {} for each in scale.concurrency}
    for number in range(scale.rounds):
        _progress(f"{pattern}, round {number + 1} of {scale.rounds}")
        made = traffic(pattern, f"scale {number}", scale.sessions, 1, bench.count, turns=len(results))
        turns = [
            made.timed[0][start:][: scale.sessions] for start in range(0, len(made.timed[0]), scale.sessions)
        ]
        for contender, pid in bench.turns(number):
            runner.warm(contender, made, pattern)
            for concurrency, turn in zip(results, turns, strict=True):
                _sample(results[concurrency], contender, pid, turn, concurrency, pattern)
    for concurrency, samples in results.items():
        title = f"{pattern}, {concurrency} connections (rounds of {scale.sessions} requests: {scale.rounds})"
        yield table.latencies(title, {name: _row(each) for name, each in samples.items()})


def long_streams(bench: Bench, scale: Scale) -> Iterator[str]:
    """The tables of concurrent streams, all of which are requested at the same time, each on its own connection."""
    pattern = TrafficPattern(True, Content(4096, "distinct"), scale.chunks)
    for streams in scale.streams:
        _progress(f"{streams} streams of {scale.chunks} chunks")
        made = traffic(pattern, f"scale {streams}", streams, 1, bench.count)
        samples: Samples = {}
        for contender, pid in bench.turns(0):
            if contender.name != peers.SGLANG:  # it delays streams
                _sample(samples, contender, pid, made.timed[0], streams, pattern)
        title = f"{pattern}, {streams:,} concurrent (rounds: 1)"
        yield table.first_bytes(title, {name: _row(each) for name, each in samples.items()})


def workers(bench: Bench, scale: Scale) -> str:
    """The table of one worker and two, all on the same core, so that only their CPU time can be compared."""
    ratios = {}
    for pattern in WORKER_PATTERNS:
        rounds: dict[str, list[Round]] = {ONE: [], TWO: []}
        for number in range(scale.rounds):
            _progress(f"workers, {pattern}, round {number + 1} of {scale.rounds}")
            for name, measured in runner.measure_throughput(bench, pattern, number, 1.0).items():
                rounds[name].append(measured)
        summaries = summarise(rounds, compared_with=ONE)
        ratios[pattern] = (summaries[ONE].cpu, summaries[TWO].cpu)
    return table.workers(ratios)


def _sample(
    samples: Samples,
    contender: Contender,
    pid: int,
    requests: list[bytes],
    connections: int,
    pattern: TrafficPattern,
) -> None:
    """Measure one contender and add the result to `samples`. If it returns an error, it has no result."""
    results = samples.setdefault(contender.name, [])
    before = cpu_seconds(pid)
    try:
        load = runner.drive(contender, Traffic([], [requests] * connections, shared=True), pattern)
    except WireError as error:
        _progress(f"{contender.name}: {error}")
        return
    # Load.rate counts only until one connection has no more requests, which is too early if each has few.
    seconds = (max(load.finished) - min(load.sent)) / 1e9
    results.append(
        Sample(
            len(load.finished) / seconds,
            [each / 1e9 for each in load.latencies],
            [each / 1e9 for each in load.first_byte],
            (cpu_seconds(pid) - before) / len(load.finished),
        )
    )


def _row(samples: list[Sample]) -> table.Row | None:
    """The medians over the rounds. None if no round succeeded."""
    if not samples:
        return None
    latencies, first_byte = (
        [quantiles(values, n=100) for values in of_samples]
        for of_samples in ([each.latencies for each in samples], [each.first_byte for each in samples])
    )
    return table.Row(
        rate=median(each.rate for each in samples),
        latency=(median(each[49] for each in latencies), median(each[98] for each in latencies)),
        first_byte=(median(each[49] for each in first_byte), median(each[98] for each in first_byte)),
        cpu=median(each.cpu for each in samples),
    )


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
