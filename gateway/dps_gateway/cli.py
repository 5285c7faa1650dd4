"""The `dps` command: a table of subcommands, each imported only when it is called."""

import sys
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Command:
    """A subcommand: where its `main(argv) -> exit status` lives, and the extra that installs what it needs."""

    module: str
    extra: str
    help: str


COMMANDS = {
    "gateway": Command("dps_gateway.app", "gateway", "run the gateway: dps gateway --config FILE"),
    "operator": Command("dps_operator.app", "operator", "run the Kubernetes operator"),
    "session": Command("dps_gateway.session_command", "gateway", "look at a session's record, or delete it"),
    "engine": Command("dps_lab.engine.cli", "lab", "run an emulated SGLang server (no GPU)"),
    "up": Command("dps_lab.up", "lab", "run a local stack: Redis, two engines, the gateway"),
    "demo": Command("dps_lab.demo", "lab", "see it work: real sessions, a gateway killed in mid-run, a plot"),
    "replay": Command(
        "dps_lab.replay.cli", "lab", "replay recorded sessions against any OpenAI-compatible URL"
    ),
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: dps COMMAND [OPTION ...]", "", *lines, "", "dps COMMAND --help tells more."])


def main() -> int:
    """Run `dps`: exit status 0, or 2 for a call that cannot be understood."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    command = COMMANDS.get(name)
    if command is None:
        print(f"dps: there is no command '{name}'\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        module = import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("dps_"):
            raise
        print(
            f"dps {name} needs the package '{error.name}': pip install 'dps-router[{command.extra}]'",
            file=sys.stderr,
        )
        return 2
    status: int = module.main(rest)
    return status
