"""Options that `dps simulate` and `dps calibrate` have in common: the workload, the load and the engines."""

import argparse
from collections.abc import Sequence

from dps_gateway.pool import Pool
from dps_lab.arguments import positive_float, positive_int
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.roofline import ALGORITHMS, speculation
from dps_lab.simulate.run import Load
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import WORKLOADS


def add_workload_option(parser: argparse.ArgumentParser) -> None:
    """Add `--workload`."""
    parser.add_argument(
        "--workload",
        required=True,
        metavar="NAME|FILE|URL",
        help=f"{', '.join(WORKLOADS)}, a JSONL trace, or a decision log of the gateway: its file, or "
        "http://HOST:PORT/decisions of the admin port",
    )


def add_replicas_option(parser: argparse.ArgumentParser) -> None:
    """Add `--replicas`."""
    parser.add_argument(
        "--replicas",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of gateway replicas (default: 1)",
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add `--concurrency` and `--rate`, of which at most one may be given."""
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=positive_int, metavar="C", help="closed loop: C concurrent sessions"
    )
    load.add_argument("--rate", type=positive_float, metavar="R", help="open loop: R sessions per second")


def load_of(options: argparse.Namespace, sessions: Sequence[SessionTrace]) -> Load:
    """The load that the options describe. Raises ValueError if they give none and a session has no arrival time."""
    load = Load(options.concurrency, options.rate)
    if load == Load():
        missing = next((session.id for session in sessions if session.arrival_seconds is None), None)
        if missing is not None:
            raise ValueError(
                f"session '{missing}' has no arrival_seconds; set --concurrency C or --rate R, or add "
                "arrival_seconds to every session"
            )
    return load


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engines and of their caches."""
    engine = parser.add_argument_group("engines")
    engine.add_argument(
        "--cache",
        choices=("separate", "common"),
        default="separate",
        help="whether an engine can fetch the prefixes that another one has cached (default: separate)",
    )
    engine.add_argument(
        "--speculation",
        choices=("batched", "serialized"),
        default="batched",
        help="serialized: a speculative engine runs requests one after another, as in the paper (default: batched)",
    )
    engine.add_argument(
        "--hardware",
        choices=tuple(HARDWARE),
        default="a100-7b",
        help="GPU and size of the model (default: a100-7b)",
    )
    engine.add_argument(
        "--algorithm",
        choices=sorted(ALGORITHMS),
        default="STANDALONE",
        help="algorithm of the speculative engines (default: STANDALONE)",
    )
    engine.add_argument(
        "--acceptance-length",
        type=positive_float,
        metavar="TOKENS",
        help="mean tokens that one verification yields (default: the algorithm's)",
    )
    engine.add_argument(
        "--transfer-rate",
        type=positive_float,
        default=20.0,
        metavar="GB/S",
        help="bandwidth of fetches from a common cache, in GB/s (default: 20)",
    )


def fleet_of(options: argparse.Namespace, engines: dict[Pool, int]) -> FleetSpec:
    """A fleet of these engines, each on its own GPUs. Raises ValueError if the acceptance length is impossible."""
    return FleetSpec(
        engines=engines,
        cache=options.cache,
        serialized=options.speculation == "serialized",
        hardware=HARDWARE[options.hardware],
        speculation=speculation(options.algorithm, options.acceptance_length),
        transfer_bytes_per_second=options.transfer_rate * 1e9,
    )
