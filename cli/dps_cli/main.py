"""The `dps` command: dispatches to subcommands and imports only the one that is called."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

Main = Callable[[list[str]], int]
"""A subcommand's entry point: takes its arguments, returns the exit status."""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    load: imports the subcommand and returns its entry point.
    extra: the extra of the `dps-router` distribution that installs the subcommand's dependencies.
    help: one line for `dps --help`.
    """

    load: Callable[[], Main]
    extra: str
    help: str


def _gateway() -> Main:
    from dps_gateway.app import main

    return main


def _session() -> Main:
    from dps_gateway.commands.session import main

    return main


def _keys() -> Main:
    from dps_gateway.commands.keys import main

    return main


def _top() -> Main:
    from dps_gateway.commands.top import main

    return main


def _operator() -> Main:
    from dps_operator.app import main

    return main


def _up() -> Main:
    from dps_local.up import main

    return main


def _engine() -> Main:
    from dps_local.emulated_sglang.cli import main

    return main


def _demo() -> Main:
    from dps_lab.demo import main

    return main


def _replay() -> Main:
    from dps_lab.replay.cli import main

    return main


def _simulate() -> Main:
    from dps_lab.simulate.cli import main

    return main


def _calibrate() -> Main:
    from dps_lab.calibrate.cli import main

    return main


def _reproduce() -> Main:
    from dps_lab.paper.cli import main

    return main


COMMANDS = {
    "gateway": Command(_gateway, "gateway", "run the gateway"),
    "session": Command(_session, "gateway", "show or delete the stored record of a session"),
    "keys": Command(_keys, "gateway", "add, list or revoke API keys"),
    "top": Command(_top, "gateway", "show the load of both pools, as reported by the gateways"),
    "operator": Command(_operator, "operator", "run the Kubernetes operator"),
    "up": Command(_up, "local", "run Redis, two engines and a gateway on this machine"),
    "engine": Command(_engine, "local", "run an emulated SGLang server (no GPU)"),
    "demo": Command(_demo, "lab", "compare fleets of two engines, and kill a gateway in a further replay"),
    "replay": Command(_replay, "lab", "replay recorded sessions against an OpenAI-compatible URL"),
    "simulate": Command(_simulate, "lab", "simulate a fleet and a routing policy in virtual time"),
    "calibrate": Command(
        _calibrate, "calibrate", "find the policy, threshold and split of GPUs for a workload"
    ),
    "reproduce": Command(
        _reproduce,
        "lab",
        "simulate the results in the paper, and compare them with the published values",
    ),
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: dps COMMAND [OPTION ...]",
            "",
            *lines,
            "",
            "Run 'dps COMMAND --help' for a command's options.",
        ]
    )


def _is_missing_dependency(error: ModuleNotFoundError) -> bool:
    """Whether a package is not installed. A missing module within a package of this project would be a bug."""
    return error.name is not None and not (error.name.startswith("dps_") and "." in error.name)


def main() -> int:
    """Run `dps`. Returns the subcommand's exit status, or 2 if the command line is invalid."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    command = COMMANDS.get(name)
    if command is None:
        print(f"dps: unknown command '{name}'\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        run = command.load()
    except ModuleNotFoundError as error:
        if not _is_missing_dependency(error):
            raise
        print(
            f"dps {name} requires the package '{error.name}', which is not installed. "
            f"Install it with: pip install 'dps-router[{command.extra}]'",
            file=sys.stderr,
        )
        return 2
    return run(rest)
