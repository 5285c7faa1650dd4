"""`python -m dps_lab.bench.tracing`: benchmark the cost of tracing. Prints Markdown.

Gateways that differ only in `telemetry` take turns. Each is stopped while it is not its turn, because spans are
also exported after the last answer.
"""

import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import quantiles
from typing import Final

from dps_gateway.prompt.tokenizer import Tokenizer
from dps_lab.bench import peers, runner, table
from dps_lab.bench.peers import Contender
from dps_lab.bench.processes import StartError, running
from dps_lab.bench.summary import Round, Spread, summarise
from dps_lab.bench.traffic import Content, TrafficPattern
from dps_lab.bench.wire import WireError
from dps_local import assets
from dps_local.processes import free_ports

OFF: Final = "off"
CONTROL: Final = "off (control)"
"""The same configuration as OFF: its difference from OFF is measurement noise."""
PATTERNS: Final = (
    TrafficPattern(False, Content(4096, "distinct")),
    TrafficPattern(True, Content(4096, "growing")),
)
REQUESTS_ON_ONE_CONNECTION: Final = {"distinct": 400, "growing": 50}
"""Number of sessions. A growing session has eight turns."""


def main() -> int:
    """Run the benchmark. Returns 0, or 1 if a process cannot be run."""
    arguments = runner.options("python -m dps_lab.bench.tracing", __doc__)
    try:
        print(measure(arguments.rounds, arguments.seconds, assets.qwen_tokenizer()))
    except (StartError, WireError, RuntimeError) as error:
        print(f"tracing: {error}", file=sys.stderr)
        return 1
    return 0


def measure(rounds: int, seconds: float, tokenizer: assets.Asset) -> str:
    """Measure and return the report. Raises StartError, WireError, or RuntimeError if there are too few cores."""
    _, other = runner.two_cores()
    count = Tokenizer.load(str(tokenizer.path)).count
    throughput: dict[TrafficPattern, dict[str, list[Round]]] = {pattern: {} for pattern in PATTERNS}
    typical: dict[TrafficPattern, dict[str, list[float]]] = {pattern: {} for pattern in PATTERNS}
    slow: dict[TrafficPattern, dict[str, list[float]]] = {pattern: {} for pattern in PATTERNS}
    with (
        tempfile.TemporaryDirectory(prefix="dps-bench-") as folder,
        socket.create_server(("127.0.0.1", 0)) as silent,  # accepts connections but never responds
    ):
        directory = Path(folder)
        port, refused = free_ports(2)
        count_file = directory / "spans"
        receiver = [sys.executable, "-m", "dps_lab.bench.otlp_receiver", str(port), str(count_file)]
        configurations = _configurations(port, refused, silent.getsockname()[1])

        def line_up(upstreams: list[str], redis_port: int) -> list[Contender]:
            return [
                peers.gateway(directory, upstreams, redis_port, tokenizer.path, name, sections=sections)
                for name, sections in configurations.items()
            ]

        with (
            running(receiver, other, None, directory / "receiver.log"),
            runner.started(directory, count, line_up, freeze=True) as bench,
        ):
            for number in range(rounds):
                print(f"tracing, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                for pattern in PATTERNS:
                    for name, measured in runner.measure_throughput(bench, pattern, number, seconds).items():
                        throughput[pattern].setdefault(name, []).append(measured)
                    sessions = REQUESTS_ON_ONE_CONNECTION[pattern.content.sessions]
                    for name, latencies in runner.measure_latency(bench, pattern, number, sessions).items():
                        percentiles = quantiles(latencies, n=100)
                        typical[pattern].setdefault(name, []).append(percentiles[49])
                        slow[pattern].setdefault(name, []).append(percentiles[98])
        spans = int(count_file.read_text())
    parts = [
        f"## Cost of tracing\n\n{rounds} rounds of at most {seconds:g} s, {runner.CONNECTIONS} connections"
    ]
    for pattern in PATTERNS:
        rounds_by_name = {name: throughput[pattern][name] for name in configurations}
        summaries = summarise(rounds_by_name, compared_with=OFF)
        parts.append(
            table.cost_of_tracing(pattern, summaries, _spread(typical[pattern]), _spread(slow[pattern]))
        )
    return "\n\n".join([*parts, f"The working backend received {spans:,} spans."])


def _configurations(port: int, refused: int, silent: int) -> dict[str, Mapping[str, Mapping[str, object]]]:
    def to(port: int, ratio: float = 1.0) -> Mapping[str, Mapping[str, object]]:
        return {"telemetry": {"otlpEndpoint": f"http://127.0.0.1:{port}", "sampleRatio": ratio}}

    return {
        OFF: {},
        CONTROL: {},
        "1% of requests": to(port, 0.01),
        "all": to(port),
        "all, backend refuses": to(refused),
        "all, backend hangs": to(silent),
    }


def _spread(rounds: Mapping[str, list[float]]) -> dict[str, Spread]:
    return {name: Spread.of(values) for name, values in rounds.items()}


if __name__ == "__main__":
    sys.exit(main())
