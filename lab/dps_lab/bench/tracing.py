"""`python -m dps_lab.bench.tracing`: what it costs to trace requests, beside not doing it. Prints Markdown.

Gateways that differ in `telemetry` alone take turns; each stands still while it is not its turn, because
spans are sent after the last answer too.
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
from dps_lab.bench.traffic import Cell, Content
from dps_lab.bench.wire import WireError
from dps_local import assets
from dps_local.processes import free_ports

OFF: Final = "off"
CONTROL: Final = "off, once more"
"""The same as OFF: what it differs by, the measurement cannot tell apart."""
CELLS: Final = (Cell(False, Content(4096, "distinct")), Cell(True, Content(4096, "growing")))
REQUESTS_ON_ONE_CONNECTION: Final = {"distinct": 400, "growing": 50}
"""Sessions; a growing one has eight turns."""


def main() -> int:
    """Exit status 0, or 1 with a sentence when something that is measured cannot be run."""
    arguments = runner.options("python -m dps_lab.bench.tracing", __doc__)
    try:
        print(measure(arguments.rounds, arguments.seconds, assets.qwen_tokenizer()))
    except (StartError, WireError, RuntimeError) as error:
        print(f"tracing: {error}", file=sys.stderr)
        return 1
    return 0


def measure(rounds: int, seconds: float, tokenizer: assets.Asset) -> str:
    """The report. Raises what `runner.started` and the load raise."""
    _, other = runner.two_cores()
    count = Tokenizer.load(str(tokenizer.path)).count
    throughput: dict[Cell, dict[str, list[Round]]] = {cell: {} for cell in CELLS}
    typical: dict[Cell, dict[str, list[float]]] = {cell: {} for cell in CELLS}
    slow: dict[Cell, dict[str, list[float]]] = {cell: {} for cell in CELLS}
    with (
        tempfile.TemporaryDirectory(prefix="dps-bench-") as name,
        socket.create_server(("127.0.0.1", 0)) as silent,  # takes connections, and never says a word
    ):
        directory = Path(name)
        port, refused = free_ports(2)
        came = directory / "spans"
        receiver = [sys.executable, "-m", "dps_lab.bench.otlp_receiver", str(port), str(came)]
        ways = _ways(port, gone=refused, silent=silent.getsockname()[1])

        def line_up(upstreams: list[str], redis_port: int) -> list[Contender]:
            return [
                peers.gateway(directory, upstreams, redis_port, tokenizer.path, way, telemetry)
                for way, telemetry in ways.items()
            ]

        with (
            running(receiver, other, None, directory / "receiver.log"),
            runner.started(directory, count, line_up, freeze=True) as bench,
        ):
            for number in range(rounds):
                print(f"tracing, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                for cell in CELLS:
                    for way, measured in runner.measure_throughput(bench, cell, number, seconds).items():
                        throughput[cell].setdefault(way, []).append(measured)
                    sessions = REQUESTS_ON_ONE_CONNECTION[cell.content.sessions]
                    for way, latencies in runner.measure_latency(bench, cell, number, sessions).items():
                        percentiles = quantiles(latencies, n=100)
                        typical[cell].setdefault(way, []).append(percentiles[49])
                        slow[cell].setdefault(way, []).append(percentiles[98])
        spans = int(came.read_text())
    parts = [
        f"## What tracing costs\n\n{rounds} rounds of at most {seconds:g} s, {runner.CONNECTIONS} connections"
    ]
    for cell in CELLS:
        summaries = summarise({way: throughput[cell][way] for way in ways}, compared_with=OFF)
        parts.append(table.cost_of_tracing(cell, summaries, _spread(typical[cell]), _spread(slow[cell])))
    return "\n\n".join([*parts, f"{spans:,} spans came to the backend that takes them."])


def _ways(port: int, gone: int, silent: int) -> dict[str, Mapping[str, object]]:
    def to(port: int, ratio: float = 1.0) -> Mapping[str, object]:
        return {"otlpEndpoint": f"http://127.0.0.1:{port}", "sampleRatio": ratio}

    return {
        OFF: {},
        CONTROL: {},
        "one in a hundred": to(port, 0.01),
        "all": to(port),
        "all, backend refuses": to(gone),
        "all, backend is silent": to(silent),
    }


def _spread(rounds: Mapping[str, list[float]]) -> dict[str, Spread]:
    return {name: Spread.of(values) for name, values in rounds.items()}


if __name__ == "__main__":
    sys.exit(main())
