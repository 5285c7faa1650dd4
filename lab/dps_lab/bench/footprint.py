"""`python -m dps_lab.bench.footprint`: memory of routers at start, and bytes of a session in Redis. Prints Markdown."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import uvloop
from redis import Redis

from dps_gateway.prompt.tokenizer import Tokenizer
from dps_lab.bench import peers, runner, table
from dps_lab.bench.fake_engine import is_whole
from dps_lab.bench.load import run_load
from dps_lab.bench.peers import Contender
from dps_lab.bench.processes import StartError, resident_bytes
from dps_lab.bench.traffic import Content, Count, TrafficPattern, traffic
from dps_lab.bench.wire import WireError
from dps_local import assets

SESSIONS: Final = 200
TURNS: Final = 4


def main() -> int:
    """Run the benchmark. Returns 0, or 1 if a process cannot be run."""
    try:
        print(measure(assets.qwen_tokenizer()))
    except (StartError, WireError, RuntimeError) as error:
        print(f"footprint: {error}", file=sys.stderr)
        return 1
    return 0


def measure(tokenizer: assets.Asset) -> str:
    """Measure and return the report. Raises StartError, WireError, or RuntimeError if there are too few cores."""
    count = Tokenizer.load(str(tokenizer.path)).count
    python = peers.install_peers(assets.cache_dir())
    redis_ports = []
    with tempfile.TemporaryDirectory(prefix="dps-bench-") as folder:

        def line_up(upstreams: list[str], redis_port: int) -> list[Contender]:
            redis_ports.append(redis_port)
            return peers.contenders(Path(folder), upstreams, redis_port, tokenizer.path, python)

        with runner.started(Path(folder), count, line_up) as bench:
            memory = {
                each.name: resident_bytes(pid) for each, pid in bench.contenders.items() if each.command
            }
            port = next(each.port for each in bench.contenders if each.admin_port)
            stored = {
                sessions: stored_bytes(port, redis_ports[0], count, with_id=sessions == "with an id")
                for sessions in ("with an id", "without an id")
            }
    rows = [[name, f"{size / 2**20:.0f}"] for name, size in memory.items()]
    sizes = [[sessions, f"{size:,.0f}"] for sessions, size in stored.items()]
    return (
        f"## Memory at start\n\n{table.markdown(['router', 'MiB'], rows)}\n\n"
        f"## Redis\n\n{table.markdown([f'sessions of {TURNS} turns', 'bytes per session'], sizes)}"
    )


def stored_bytes(port: int, redis_port: int, count: Count, *, with_id: bool) -> float:
    """The bytes in Redis per session after TURNS turns, keys and pointers included (`MEMORY USAGE`)."""
    pattern = TrafficPattern(False, Content(4096, "growing"))
    requests = traffic(pattern, f"footprint {with_id}", SESSIONS, 1, count)
    turns = [*requests.warm[0], *requests.timed[0][: (TURNS - 1) * SESSIONS]]
    if with_id:
        turns = [_with_id(request, number % SESSIONS) for number, request in enumerate(turns)]
    with Redis(port=redis_port) as redis:
        redis.flushall()
        uvloop.run(run_load(port, [iter(turns)], partial(is_whole, stream=False)))
        return sum(redis.memory_usage(key, samples=0) or 0 for key in redis.scan_iter("dps:{*")) / SESSIONS


def _with_id(request: bytes, number: int) -> bytes:
    return request.replace(b"\r\n", b"\r\nx-session-id: session-%d\r\n" % number, 1)


if __name__ == "__main__":
    sys.exit(main())
