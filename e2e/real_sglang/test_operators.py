"""The shim's operators for draft trees do what SGLang's kernels do."""

import json
import subprocess
from pathlib import Path

import pytest

from e2e.real_sglang.local_sglang import PYTHON, install

pytestmark = pytest.mark.timeout(2400)

SECONDS = 600.0


def test_draft_trees_have_sglangs_links_and_are_verified_along_their_branches() -> None:
    install()
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("check_operators.py")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "links equal those of SGLang": True,
        "accepted": {
            "predicts": [3, -1, 5, -1, 7, 2, 9, -1, -1, -1],
            "index": [[0, 2, 4, -1], [5, 6, -1, -1]],
            "count": [2, 1],
        },
    }
