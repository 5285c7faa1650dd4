"""The `dps` command: dispatches to subcommands and imports only the one that is called."""

import sys
from collections.abc import Callable
from importlib import import_module

COMMANDS: dict[str, tuple[str, str, str]] = {
    "gateway": ("dps_gateway.app", "gateway", "run the gateway"),
    "session": ("dps_gateway.commands.session", "gateway", "show or delete the stored record of a session"),
    "keys": ("dps_gateway.commands.keys", "gateway", "add, list or revoke API keys"),
    "top": (
        "dps_gateway.commands.top",
        "gateway",
        "show the pools of gateways, and decisions as they are made",
    ),
    "operator": ("dps_operator.app", "operator", "run the Kubernetes operator"),
    "up": ("dps_local.up", "local", "run Redis, two engines and a gateway on this machine"),
    "engine": ("dps_local.emulated_sglang.server", "local", "run an emulated SGLang server (no GPU)"),
    "demo": ("dps_lab.demo", "lab", "compare fleets of two engines, and kill a gateway in a further replay"),
    "replay": ("dps_lab.replay.cli", "lab", "replay recorded sessions against an OpenAI-compatible URL"),
    "simulate": ("dps_lab.simulate.cli", "lab", "simulate a fleet and a routing policy in virtual time"),
    "calibrate": (
        "dps_lab.calibrate.cli",
        "calibrate",
        "find the policy, threshold and split of GPUs for a workload",
    ),
    "reproduce": (
        "dps_lab.paper.reproduce",
        "lab",
        "simulate the results in the paper, and compare them with the published values",
    ),
}
"""The subcommands: the module whose function `main` takes the arguments and returns the exit status, the extra of the
`dps-router` distribution that installs its dependencies, and one line for `dps --help`."""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help_line}" for name, (_, _, help_line) in COMMANDS.items()]
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
    if name not in COMMANDS:
        print(f"dps: unknown command '{name}'\n\n{_usage()}", file=sys.stderr)
        return 2
    module, extra, _ = COMMANDS[name]
    try:
        run: Callable[[list[str]], int] = import_module(module).main
    except ModuleNotFoundError as error:
        # A missing module within a package of this project is a bug, not a missing dependency.
        if error.name is None or (error.name.startswith("dps_") and "." in error.name):
            raise
        print(
            f"dps {name} requires the package '{error.name}', which is not installed. "
            f"Install it with: pip install 'dps-router[{extra}]'",
            file=sys.stderr,
        )
        return 2
    return run(rest)
