"""The measurement: contenders take turns, round by round, with the same requests, one core for the router."""

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
from dps_lab.bench.traffic import Cell, Content, Count, Sessions, Traffic, traffic
from dps_local.processes import free_ports
from dps_local.redis_server import redis_command

CONNECTIONS: Final = 16
CONTENTS: Final = tuple(Content(size, sessions) for size in (4096, 32768) for sessions in get_args(Sessions))
CELLS: Final = tuple(Cell(stream, content) for stream in (False, True) for content in CONTENTS)

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
    """What runs during a benchmark: contenders with their process ids, the routers' core, how texts are
    counted, and whether a contender stands still while it is not its turn, which matters where one has work
    left after its last answer."""

    contenders: dict[Contender, int]
    core: int
    count: Count
    freeze: bool = False

    @property
    def gateway_admin_port(self) -> int:
        """Where the gateway tells its metrics."""
        return next(each.admin_port for each in self.contenders if each.admin_port)

    def turns(self, number: int) -> list[tuple[Contender, int]]:
        """The contenders in a round's order, which starts with another one in each round."""
        everyone = list(self.contenders.items())
        first = number % len(everyone)
        return everyone[first:] + everyone[:first]

    @contextmanager
    def turn(self, pid: int) -> Iterator[None]:
        """The turn of one of the contenders."""
        if self.freeze:
            os.kill(pid, signal.SIGCONT)
        try:
            yield
        finally:
            if self.freeze:
                os.kill(pid, signal.SIGSTOP)


def options(program: str, description: str | None) -> argparse.Namespace:
    """The command line of a benchmark: `rounds`, and `seconds` of the longest turn in a cell."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which everybody takes a turn (5)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="the longest turn in a cell, in seconds (1)"
    )
    return parser.parse_args()


def two_cores() -> tuple[int, int]:
    """The router's core and everybody else's. Raises RuntimeError where there are no two to pin to."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise RuntimeError("make bench needs Linux and two CPU cores: one for the router, one for the rest")
    return cores[0], cores[1]


@contextmanager
def started(
    directory: Path, count: Count, line_up: Callable[[list[str], int], list[Contender]], freeze: bool = False
) -> Iterator[Bench]:
    """Everything up and ready, and down again at the end; logs and configuration in `directory`.

    line_up: who takes part, from the URLs of both engines and the port of Redis.
    """
    core, other = two_cores()
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {other})
    ports = free_ports(2)
    upstreams = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, everywhere)

        def start(name: str, command: Sequence[str], on: int, ready: str | None) -> int:
            log = directory / f"{name.replace(' ', '-')}.log"
            return stack.enter_context(running(command, on, ready, log))

        (redis_port,) = free_ports(1)
        start("redis", redis_command(redis_port, directory), other, None)
        fake = [sys.executable, "-m", "dps_lab.bench.fake_engine", *map(str, ports)]
        fake_pid = start("fake", fake, other, f"{upstreams[0]}/health")
        everyone = line_up(upstreams, redis_port)
        pids = [
            start(each.name, each.command, core, each.ready) if each.command else fake_pid
            for each in everyone
        ]
        bench = Bench(dict(zip(everyone, pids, strict=True)), core, count, freeze)
        try:
            for pid in pids if freeze else ():
                os.kill(pid, signal.SIGSTOP)
            yield bench
        finally:
            for pid in pids if freeze else ():
                os.kill(pid, signal.SIGCONT)


def measure_throughput(bench: Bench, cell: Cell, number: int, seconds: float) -> dict[str, Round]:
    """One round of one cell, by contender; at most `seconds` for each."""
    requests = traffic(cell, f"round {number}", _SESSIONS[cell.content], CONNECTIONS, bench.count)
    rounds = {}
    for contender, pid in bench.turns(number):
        with bench.turn(pid):
            _warm(contender, requests, cell)
            began, before, busy_before = time.monotonic(), cpu_seconds(pid), core_seconds(bench.core)
            load = _load(contender, requests, cell, seconds)
            used, busy = cpu_seconds(pid) - before, core_seconds(bench.core) - busy_before
        others = max(0.0, busy - (used if contender.command else 0.0)) / (time.monotonic() - began)
        latency = median(load.latencies) / 1e9
        rounds[contender.name] = Round(load.rate, latency, used, len(load.finished), others)
    return rounds


def measure_latency(bench: Bench, cell: Cell, number: int, requests_each: int) -> dict[str, list[float]]:
    """One round of one cell on one connection, by contender: every request's latency in seconds."""
    requests = traffic(cell, f"latency {number}", requests_each, 1, bench.count)
    latencies = {}
    for contender, pid in bench.turns(number):
        with bench.turn(pid):
            _warm(contender, requests, cell)
            load = _load(contender, requests, cell)
        latencies[contender.name] = [each / 1e9 for each in load.latencies]
    return latencies


@dataclass(frozen=True)
class LowLoad:
    """One round at one connection: seconds from sending a request to its first byte's arrival at the engine,
    by contender, each the round's median; and the mean that the gateway's own histogram gives."""

    reached: dict[str, float]
    overhead: float

    def added(self) -> dict[str, float]:
        """What each router adds to the time that it takes without one."""
        direct = self.reached[peers.NOTHING]
        return {name: value - direct for name, value in self.reached.items() if name != peers.NOTHING}


def measure_low_load(bench: Bench, content: Content, number: int) -> LowLoad:
    """One round of unary requests on one connection."""
    cell = Cell(False, content)
    sessions = _SESSIONS_AT_LOW_LOAD[content.sessions]
    requests = traffic(cell, f"low load {number}", sessions, 1, bench.count)
    reached, overhead = {}, 0.0
    for contender, _ in bench.turns(number):
        _warm(contender, requests, cell)
        before = metrics.scrape(contender.admin_port) if contender.admin_port else {}
        load = _load(contender, requests, cell, keep=True)
        reached[contender.name] = median(_reached(load))
        if contender.admin_port:
            overhead = metrics.mean_between(before, metrics.scrape(contender.admin_port), OVERHEAD)
    return LowLoad(reached, overhead)


def overhead(rounds: Sequence[LowLoad]) -> float:
    """The gateway's own figure: the median of the rounds' means, in seconds."""
    return median(each.overhead for each in rounds)


def spread_of_added(rounds: Sequence[LowLoad]) -> dict[str, Spread]:
    """By contender, the added seconds over all rounds."""
    added = [each.added() for each in rounds]
    return {name: Spread.of([each[name] for each in added]) for name in added[0]}


def _reached(load: Load) -> list[float]:
    return [(arrived_at(body) - sent) / 1e9 for body, sent in zip(load.bodies, load.sent, strict=True)]


def _warm(contender: Contender, requests: Traffic, cell: Cell) -> None:
    check = partial(is_whole, stream=cell.stream)
    sequences = [iter(mine) for mine in requests.warm if mine]
    if sequences:
        uvloop.run(run_load(contender.port, sequences, check))


def _load(
    contender: Contender, requests: Traffic, cell: Cell, seconds: float = math.inf, keep: bool = False
) -> Load:
    check: Callable[[bytes], bool] = partial(is_whole, stream=cell.stream)
    gc.collect()
    gc.disable()
    try:
        return uvloop.run(run_load(contender.port, requests.sequences(), check, seconds, keep))
    finally:
        gc.enable()
