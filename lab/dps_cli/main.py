"""The `dps` command: dispatches to subcommands and imports only the one that is called."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

Main = Callable[[list[str]], int]
"""A subcommand's entry point: takes its arguments, returns the exit status."""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    module: the module whose function `main` is the entry point.
    extra: the extra of the `dps-router` distribution that installs the subcommand's dependencies.
    help: one line for `dps --help`.
    """

    module: str
    extra: str
    help: str

    def load(self) -> Main:
        """Import the subcommand and return its entry point."""
        main: Main = import_module(self.module).main
        return main


COMMANDS = {
    "gateway": Command("dps_gateway.app", "gateway", "run the gateway"),
    "session": Command(
        "dps_gateway.commands.session", "gateway", "show or delete the stored record of a session"
    ),
    "keys": Command("dps_gateway.commands.keys", "gateway", "add, list or revoke API keys"),
    "top": Command(
        "dps_gateway.commands.top", "gateway", "show the pools of gateways, and decisions as they are made"
    ),
    "operator": Command("dps_operator.app", "operator", "run the Kubernetes operator"),
    "up": Command("dps_local.up", "local", "run Redis, two engines and a gateway on this machine"),
    "engine": Command("dps_local.emulated_sglang.server", "local", "run an emulated SGLang server (no GPU)"),
    "demo": Command(
        "dps_lab.demo", "lab", "compare fleets of two engines, and kill a gateway in a further replay"
    ),
    "replay": Command(
        "dps_lab.replay.cli", "lab", "replay recorded sessions against an OpenAI-compatible URL"
    ),
    "simulate": Command(
        "dps_lab.simulate.cli", "lab", "simulate a fleet and a routing policy in virtual time"
    ),
    "calibrate": Command(
        "dps_lab.calibrate.cli", "calibrate", "find the policy, threshold and split of GPUs for a workload"
    ),
    "reproduce": Command(
        "dps_lab.paper.reproduce",
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
        # A missing module within a package of this project is a bug, not a missing dependency.
        if error.name is None or (error.name.startswith("dps_") and "." in error.name):
            raise
        print(
            f"dps {name} requires the package '{error.name}', which is not installed. "
            f"Install it with: pip install 'dps-router[{command.extra}]'",
            file=sys.stderr,
        )
        return 2
    return run(rest)
