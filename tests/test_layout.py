"""The folder layout does not shadow the standard library."""

import operator
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.__file__ is not None
    assert Path(operator.__file__).parent == Path(sysconfig.get_path("stdlib"))


def test_standard_library_is_importable_from_repository_root() -> None:
    subprocess.run([sys.executable, "-c", "import collections, argparse, operator"], cwd=ROOT, check=True)
