"""`python -m dps_lab.bench.soak`: memory of the gateway and of Redis under many sessions. Prints Markdown."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from redis import Redis

from dps_gateway.prompt.tokenizer import Tokenizer
from dps_lab.bench import metrics, peers, runner, table
from dps_lab.bench.peers import Contender
from dps_lab.bench.processes import StartError, cpu_seconds, resident_bytes
from dps_lab.bench.runner import Bench
from dps_lab.bench.traffic import Content, TrafficPattern, traffic
from dps_lab.bench.wire import WireError
from dps_local import assets

TURNS: Final = 2
CONTENT: Final = Content(2048, "growing")
ROWS: Final = 10
IN_FLIGHT: Final = "dps_in_flight"


@dataclass(frozen=True)
class Soak:
    """How much is sent, and how fast."""

    sessions: int = 200_000
    """Sessions, each of which has TURNS turns. Every second batch of them is streamed."""
    minutes: float = 30
    """The time over which the sessions are spread, and after which no more are sent."""
    batch: int = 500
    """Sessions per batch."""


@dataclass(frozen=True)
class Sample:
    """The state after a batch of sessions."""

    seconds: float
    sessions: int
    gateway_bytes: int
    """The resident memory of the gateway."""
    redis_bytes: int
    """The memory that Redis has allocated (`used_memory`)."""


def main() -> int:
    """Run the benchmark. Returns 0, or 1 if a process cannot be run or a request fails."""
    parser = argparse.ArgumentParser(prog="python -m dps_lab.bench.soak", description=__doc__)
    parser.add_argument("--sessions", type=int, default=Soak.sessions, metavar="N", help="number of sessions")
    parser.add_argument("--minutes", type=float, default=Soak.minutes, metavar="N", help="duration")
    arguments = parser.parse_args()
    try:
        print(measure(assets.qwen_tokenizer(), Soak(arguments.sessions, arguments.minutes)))
    except (StartError, WireError, RuntimeError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    return 0


def measure(tokenizer: assets.Asset, soak: Soak) -> str:
    """Measure and return the report. Raises StartError, WireError, or RuntimeError if there are too few cores."""
    count = Tokenizer.load(str(tokenizer.path)).count
    redis_ports = []
    with tempfile.TemporaryDirectory(prefix="dps-bench-") as folder:

        def line_up(upstreams: list[str], redis_port: int) -> list[Contender]:
            redis_ports.append(redis_port)
            return [peers.gateway(Path(folder), upstreams, redis_port, tokenizer.path)]

        with runner.started(Path(folder), count, line_up) as bench:
            ((gateway, pid),) = bench.contenders.items()
            samples = list(run(bench, gateway, pid, redis_ports[0], soak))
            in_flight = sum(metrics.rise({}, metrics.scrape(bench.gateway_admin_port), IN_FLIGHT).values())
            requests = samples[-1].sessions * TURNS
            cpu = cpu_seconds(pid) / requests
    return report(samples, in_flight, cpu)


def run(bench: Bench, gateway: Contender, pid: int, redis_port: int, soak: Soak) -> Iterator[Sample]:
    """Send the sessions in batches that are spread evenly over the time. Yields a sample before and after each."""
    began = time.monotonic()
    with Redis(port=redis_port) as redis:

        def sample(sessions: int) -> Sample:
            used = int(redis.info("memory")["used_memory"])
            return Sample(time.monotonic() - began, sessions, resident_bytes(pid), used)

        yield sample(0)
        for start in range(0, soak.sessions, soak.batch):
            pattern = TrafficPattern(start // soak.batch % 2 == 1, CONTENT)
            size = min(soak.batch, soak.sessions - start)
            made = traffic(pattern, f"soak {start}", size, runner.CONNECTIONS, bench.count, turns=TURNS - 1)
            if time.monotonic() - began > 60 * soak.minutes:
                return
            time.sleep(max(0.0, began + 60 * soak.minutes * start / soak.sessions - time.monotonic()))
            runner.warm(gateway, made, pattern)
            runner.drive(gateway, made, pattern)
            yield sample(start + size)
            if start % (20 * soak.batch) == 0:
                print(
                    f"{start + size:,} sessions, {time.monotonic() - began:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )


def report(samples: list[Sample], in_flight: float, cpu: float) -> str:
    """The report. cpu: CPU seconds of the gateway per request."""
    last = len(samples) - 1
    shown = [samples[round(last * row / ROWS)] for row in range(ROWS + 1)]
    rows = [
        [
            f"{each.seconds / 60:.1f}",
            f"{each.sessions:,}",
            f"{each.gateway_bytes / 2**20:.0f}",
            f"{each.redis_bytes / 2**20:.0f}",
        ]
        for each in shown
    ]
    header = ["minutes", "sessions", "gateway, MiB", "Redis, MiB"]
    return (
        f"## Sessions over time\n\n{table.markdown(header, rows)}\n\n"
        f"Requests in flight at the end: {in_flight:.0f}. CPU time per request: {cpu * 1e6:.0f} µs."
    )


if __name__ == "__main__":
    sys.exit(main())
