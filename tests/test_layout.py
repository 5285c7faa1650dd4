"""What the layout promises: folders that shadow nothing, and a command that needs only what it runs."""

import importlib.util
import operator
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dps_gateway.cli import COMMANDS

ROOT = Path(__file__).parent.parent


def test_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.__file__ is not None
    assert Path(operator.__file__).parent == Path(sysconfig.get_path("stdlib"))


def test_the_standard_library_works_with_the_root_as_working_directory() -> None:
    subprocess.run([sys.executable, "-c", "import collections, argparse, operator"], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_main(name: str) -> None:
    spec = importlib.util.find_spec(COMMANDS[name].module)
    assert spec is not None
    assert spec.origin is not None
    assert "def main(" in Path(spec.origin).read_text()
