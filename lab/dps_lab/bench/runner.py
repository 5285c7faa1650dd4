"""The measurement: in every round, each contender in turn serves the same requests, with the router on one core."""

import argparse
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, get_args

import uvloop

from dps_lab.bench import metrics, peers
from dps_lab.bench.fake_engine import arrived_at, is_whole
from dps_lab.bench.load import Load, run_load
from dps_lab.bench.peers import Contender
from dps_lab.bench.processes import core_seconds, cpu_seconds, running
from dps_lab.bench.summary import Round, Spread
from dps_lab.bench.traffic import Content, Count, Sessions, Traffic, TrafficPattern, traffic
from dps_local.processes import free_ports
from dps_local.redis_server import redis_command

CONNECTIONS: Final = 16
CONTENTS: Final = tuple(Content(size, sessions) for size in (4096, 32768) for sessions in get_args(Sessions))
PATTERNS: Final = tuple(TrafficPattern(stream, content) for stream in (False, True) for content in CONTENTS)

_SESSIONS: Final = {
    Content(4096, "distinct"): 3000,
    Content(4096, "growing"): 256,
    Content(32768, "distinct"): 1000,
    Content(32768, "growing"): 112,
}
_SESSIONS_AT_LOW_LOAD: Final = {"distinct": 80, "growing": 10}

OVERHEAD: Final = "dps_gateway_overhead_seconds"


@dataclass(frozen=True)
class Bench:
    """A running benchmark.

    contenders: process ids by contender.
    core: the core that all routers run on.
    count: the token counter.
    freeze: whether contenders are stopped while it is not their turn. This matters if they still work after
    their last answer.
    """

    contenders: dict[Contender, int]
    core: int
    count: Count
    freeze: bool = False

    @property
    def gateway_admin_port(self) -> int:
        """The admin port of the gateway."""
        return next(each.admin_port for each in self.contenders if each.admin_port)

    def turns(self, number: int) -> list[tuple[Contender, int]]:
        """The contenders in the order of round `number`. Each round starts with a different one."""
        contenders = list(self.contenders.items())
        first = number % len(contenders)
        return contenders[first:] + contenders[:first]

    @contextmanager
    def turn(self, pid: int) -> Iterator[None]:
        """Let the contender with this process id run within the context."""
        if self.freeze:
            os.kill(pid, signal.SIGCONT)
        try:
            yield
        finally:
            if self.freeze:
                os.kill(pid, signal.SIGSTOP)


def options(program: str, description: str | None) -> argparse.Namespace:
    """Parse the command line of a benchmark: `rounds`, and `seconds` per traffic pattern and contender."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="number of rounds (default: 5)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="longest run of one contender with one traffic pattern, in seconds (default: 1)",
    )
    return parser.parse_args()


def two_cores() -> tuple[int, int]:
    """The core of the router and the core of all other processes. Raises RuntimeError if there are fewer than two."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise RuntimeError("the benchmark requires Linux and two CPU cores, one of them for the router")
    return cores[0], cores[1]


@contextmanager
def started(
    directory: Path, count: Count, line_up: Callable[[list[str], int], list[Contender]], freeze: bool = False
) -> Iterator[Bench]:
    """Run Redis, the fake engines and the contenders within the context. Logs and configuration are in `directory`.

    line_up: returns the contenders, given the URLs of both engines and the port of Redis.
    """
    core, other = two_cores()
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {other})
    ports = free_ports(2)
    upstreams = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, all_cores)

        def start(name: str, command: Sequence[str], on: int, ready: str | None) -> int:
            log = directory / f"{name.replace(' ', '-')}.log"
            return stack.enter_context(running(command, on, ready, log))

        (redis_port,) = free_ports(1)
        start("redis", redis_command(redis_port, directory), other, None)
        fake = [sys.executable, "-m", "dps_lab.bench.fake_engine", *map(str, ports)]
        fake_pid = start("fake", fake, other, f"{upstreams[0]}/health")
        contenders = line_up(upstreams, redis_port)
        pids = [
            start(each.name, each.command, core, each.ready) if each.command else fake_pid
            for each in contenders
        ]
        bench = Bench(dict(zip(contenders, pids, strict=True)), core, count, freeze)
        try:
            for pid in pids if freeze else ():
                os.kill(pid, signal.SIGSTOP)
            yield bench
        finally:
            for pid in pids if freeze else ():
                os.kill(pid, signal.SIGCONT)


def measure_throughput(
    bench: Bench, pattern: TrafficPattern, number: int, seconds: float
) -> dict[str, Round]:
    """Measure one round of one traffic pattern, by contender, with at most `seconds` for each."""
    requests = traffic(pattern, f"round {number}", _SESSIONS[pattern.content], CONNECTIONS, bench.count)
    rounds = {}
    for contender, pid in bench.turns(number):
        with bench.turn(pid):
            warm(contender, requests, pattern)
            began, before, busy_before = time.monotonic(), cpu_seconds(pid), core_seconds(bench.core)
            load = drive(contender, requests, pattern, seconds)
            used, busy = cpu_seconds(pid) - before, core_seconds(bench.core) - busy_before
        others = max(0.0, busy - (used if contender.command else 0.0)) / (time.monotonic() - began)
        latency = median(load.latencies) / 1e9
        rounds[contender.name] = Round(load.rate, latency, used, len(load.finished), others)
    return rounds


def measure_latency(
    bench: Bench, pattern: TrafficPattern, number: int, requests_each: int
) -> dict[str, list[float]]:
    """Measure one round on one connection: the latency of every request in seconds, by contender."""
    requests = traffic(pattern, f"latency {number}", requests_each, 1, bench.count)
    latencies = {}
    for contender, pid in bench.turns(number):
        with bench.turn(pid):
            warm(contender, requests, pattern)
            load = drive(contender, requests, pattern)
        latencies[contender.name] = [each / 1e9 for each in load.latencies]
    return latencies


@dataclass(frozen=True)
class LowLoad:
    """The results of one round on one connection.

    reached: seconds from sending a request to the arrival of its first byte at the engine; median by contender.
    overhead: the mean of the gateway's own histogram, in seconds.
    """

    reached: dict[str, float]
    overhead: float

    def added(self) -> dict[str, float]:
        """The seconds that each router adds to the direct connection."""
        direct = self.reached[peers.NOTHING]
        return {name: value - direct for name, value in self.reached.items() if name != peers.NOTHING}


def measure_low_load(bench: Bench, content: Content, number: int) -> LowLoad:
    """Measure one round of requests without streaming on one connection."""
    pattern = TrafficPattern(False, content)
    sessions = _SESSIONS_AT_LOW_LOAD[content.sessions]
    requests = traffic(pattern, f"low load {number}", sessions, 1, bench.count)
    reached, overhead = {}, 0.0
    for contender, _ in bench.turns(number):
        warm(contender, requests, pattern)
        before = metrics.scrape(contender.admin_port) if contender.admin_port else {}
        load = drive(contender, requests, pattern, keep=True)
        reached[contender.name] = median(_reached(load))
        if contender.admin_port:
            overhead = metrics.mean_between(before, metrics.scrape(contender.admin_port), OVERHEAD)
    return LowLoad(reached, overhead)


def overhead(rounds: Sequence[LowLoad]) -> float:
    """The overhead that the gateway reports, in seconds: the median of the rounds' means."""
    return median(each.overhead for each in rounds)


def spread_of_added(rounds: Sequence[LowLoad]) -> dict[str, Spread]:
    """The added seconds over all rounds, by contender."""
    added = [each.added() for each in rounds]
    return {name: Spread.of([each[name] for each in added]) for name in added[0]}


def _reached(load: Load) -> list[float]:
    return [(arrived_at(body) - sent) / 1e9 for body, sent in zip(load.bodies, load.sent, strict=True)]


def warm(contender: Contender, requests: Traffic, pattern: TrafficPattern) -> None:
    """Send the requests that precede the measurement."""
    check = partial(is_whole, stream=pattern.stream, chunks=pattern.chunks)
    sequences = [iter(mine) for mine in requests.warm if mine]
    if sequences:
        uvloop.run(run_load(contender.port, sequences, check))


def drive(
    contender: Contender,
    requests: Traffic,
    pattern: TrafficPattern,
    seconds: float = math.inf,
    keep: bool = False,
) -> Load:
    """Send the timed requests, for at most `seconds`. Raises WireError. `keep`: also return the answers' bodies."""
    check: Callable[[bytes], bool] = partial(is_whole, stream=pattern.stream, chunks=pattern.chunks)
    gc.collect()
    gc.disable()
    try:
        return uvloop.run(run_load(contender.port, requests.sequences(), check, seconds, keep))
    finally:
        gc.enable()
