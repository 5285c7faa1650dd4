"""`python -m dps_lab.bench`: compare the gateway with vllm-router and LiteLLM's proxy. Prints Markdown.

In every round, each contender in turn serves the same requests, with the router on one core, and all other processes on
another one.
"""

import argparse
import gc
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from dps_gateway.cache_dir import cache_dir
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_lab.bench.contenders import (
    CACHE_AWARE,
    GATEWAY,
    LITELLM,
    LITELLM_PROXY,
    NOTHING,
    ROUND_ROBIN,
    VLLM_ROUTER,
    Contender,
    contenders,
)
from dps_lab.bench.fake_engine import is_whole
from dps_lab.bench.load import run_load
from dps_lab.bench.traffic import Count, TrafficPattern, traffic
from dps_lab.bench.wire import WireError
from dps_local import assets
from dps_local.processes import Child, ChildError, free_ports, get_if_ok, is_ok
from dps_local.redis_server import answers_ping, redis_command

CONNECTIONS: Final = 16
SESSIONS: Final = {
    (4096, "distinct"): 3000,
    (4096, "growing"): 256,
    (32768, "distinct"): 1000,
    (32768, "growing"): 112,
}
"""How many sessions one round has, by the size of the bodies and the kind of sessions."""
ONE_CONNECTION: Final = 20
"""With one connection, a round has this part of the sessions."""
PATTERNS: Final = tuple(
    TrafficPattern(stream, size, "distinct" if kind == "distinct" else "growing")
    for stream in (False, True)
    for size, kind in SESSIONS
)
COUNTERS: Final = ("dps_history_total", "dps_token_count_mismatch_total", "dps_state_errors_total")
PEERS: Final = (CACHE_AWARE, ROUND_ROBIN, LITELLM)
_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Bench:
    """A running benchmark: the contenders with their process ids, of which the direct connection has none."""

    contenders: dict[Contender, int | None]
    count: Count

    async def round(
        self, pattern: TrafficPattern, number: int, connections: int, seconds: float
    ) -> dict[str, "Result"]:
        """Drive every contender with the same new requests, each round beginning with another one."""
        sessions = SESSIONS[pattern.size, pattern.sessions]
        if connections == 1:
            sessions //= ONE_CONNECTION
        made = traffic(pattern, f"{connections} {number}", sessions, connections, self.count)
        order = list(self.contenders.items())
        first = number % len(order)
        results = {}
        for contender, pid in order[first:] + order[:first]:
            drive = partial(run_load, contender.port, is_whole=partial(is_whole, stream=pattern.stream))
            if any(made.warm):
                await drive([iter(mine) for mine in made.warm if mine])
            gc.collect()
            before = cpu_seconds(pid) if pid else 0.0
            load = await drive(made.sequences(), seconds=seconds)
            used = cpu_seconds(pid) - before if pid else 0.0
            results[contender.name] = Result(load.rate, median(load.latencies), used / len(load.latencies))
        return results


@dataclass(frozen=True)
class Result:
    """One contender in one round: requests per second, and seconds per request (median latency; CPU time)."""

    rate: float
    latency: float
    cpu: float


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of a process and its descendants, including exited threads.

    It is the sum of fields 14 and 15 of /proc/PID/stat (proc(5)) over the process tree. The resolution is one clock
    tick, usually 10 ms, so short runs cannot be measured.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return (int(fields[11]) + int(fields[12])) * _TICK + sum(map(cpu_seconds, children))


@asynccontextmanager
async def started(directory: Path, tokenizer: Path, count: Count) -> AsyncIterator[Bench]:
    """Run Redis, the fake engines and the contenders. Logs and configuration are in `directory`.

    Raises ChildError if one of them does not start, or if there are fewer than two cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise ChildError("the benchmark requires Linux and two CPU cores, one of them for the router")
    router, other = cores[:2]
    os.sched_setaffinity(0, {other})
    *ports, redis_port = free_ports(3)
    engines = [f"http://127.0.0.1:{port}" for port in ports]
    async with AsyncExitStack() as stack:

        async def start(
            name: str, command: Sequence[str], core: int, ready: Callable[[], Awaitable[bool]]
        ) -> int:
            log = directory / f"{name.replace(' ', '-')}.log"
            child = Child(name, ["taskset", "-c", str(core), *command], log, ready)
            child.start()
            stack.push_async_callback(child.stop)
            await child.wait_ready()
            return child.pid

        await start("redis", redis_command(redis_port, directory), other, partial(answers_ping, redis_port))
        fake = [sys.executable, "-m", "dps_lab.bench.fake_engine", *map(str, ports)]
        await start("fake", fake, other, partial(is_ok, f"{engines[0]}/health"))
        pids = {
            each: await start(each.name, each.command, router, partial(is_ok, each.ready))
            if each.command
            else None
            for each in contenders(directory, engines, redis_port, tokenizer, cache_dir())
        }
        yield Bench(pids, count)


async def run(rounds: int, seconds: float, patterns: Sequence[TrafficPattern]) -> None:
    """Measure the traffic patterns, and print the report."""
    tokenizer = assets.qwen_tokenizer()
    count = Tokenizer.load(str(tokenizer.path)).count
    many: dict[TrafficPattern, list[dict[str, Result]]] = {pattern: [] for pattern in patterns}
    one: dict[TrafficPattern, list[dict[str, Result]]] = {each: [] for each in patterns if not each.stream}
    with tempfile.TemporaryDirectory(prefix="dps-bench-") as directory:
        async with started(Path(directory), tokenizer.path, count) as bench:
            for number in range(rounds):
                print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                for results, connections in ((many, CONNECTIONS), (one, 1)):
                    for pattern, measured in results.items():
                        measured.append(await bench.round(pattern, number, connections, seconds))
            metrics = await gateway_metrics(next(iter(bench.contenders)).ready)
    print(_heading(rounds, seconds, tokenizer.description))
    print(f"\n{throughput_table(many)}\n\n{latency_table(one)}\n\n{metrics}")


async def gateway_metrics(ready: str) -> str:
    """The gateway's counters that show whether sessions were recognised and prompt lengths were right."""
    metrics = await get_if_ok(ready.replace("readyz", "metrics")) or b""
    return "\n".join(line for line in metrics.decode().splitlines() if line.startswith(COUNTERS))


def throughput_table(results: dict[TrafficPattern, list[dict[str, Result]]]) -> str:
    """Requests per second and CPU time per request, and ratios of the gateway's requests to those of the others.

    All are medians over the rounds. A ratio is that of one round, so that a slow machine affects both.
    """
    header = ["requests/s, CPU time per request", GATEWAY]
    header += [cell for peer in PEERS for cell in (peer, "ratio")] + [NOTHING]
    rows = []
    for pattern, rounds in results.items():
        row = [str(pattern)]
        for name in (GATEWAY, *PEERS):
            rate, cpu = (median(getattr(each[name], figure) for each in rounds) for figure in ("rate", "cpu"))
            row.append(f"{rate:,.0f}, {cpu * 1e6:.0f} µs")
            if name != GATEWAY:
                row.append(f"{median(each[GATEWAY].rate / each[name].rate for each in rounds):.2f}")
        rows.append([*row, f"{median(each[NOTHING].rate for each in rounds):,.0f}"])
    return _markdown(header, rows)


def latency_table(results: dict[TrafficPattern, list[dict[str, Result]]]) -> str:
    """The time that each router adds to the latency of a request on one connection, median over the rounds."""
    names = (GATEWAY, *PEERS)
    rows = []
    for pattern, rounds in results.items():
        added = [median(each[name].latency - each[NOTHING].latency for each in rounds) for name in names]
        rows.append([str(pattern), *(f"{seconds * 1e6:.0f} µs" for seconds in added)])
    return _markdown(["added on one connection", *names], rows)


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _heading(rounds: int, seconds: float, tokenizer: str) -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "uvloop", "redis", "fastokens"))
    return (
        f"## make bench\n\n{rounds} rounds of at most {seconds:g} s, {CONNECTIONS} connections, each router on one "
        f"core of {platform.machine()}; {VLLM_ROUTER}, {LITELLM_PROXY}; "
        f"Python {platform.python_version()}, {libraries}; {tokenizer}."
    )


def main() -> int:
    """Run the benchmark. Returns 0, or 1 if a router or another process cannot be run."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="number of rounds (default: 5)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="longest run of one contender with one traffic pattern, in seconds (default: 1)",
    )
    arguments = parser.parse_args()
    try:
        uvloop.run(run(arguments.rounds, arguments.seconds, PATTERNS))
    except (ChildError, WireError, subprocess.CalledProcessError) as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
