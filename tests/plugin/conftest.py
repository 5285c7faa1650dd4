"""A small file system, and the state of a process that may share pages."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dps_sglang import metrics, sharing
from dps_sglang.sharing import Sharing


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small file system needs privileges")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sharing]:
    """The state of a process that has just started."""
    state = Sharing()
    monkeypatch.setattr(sharing, "SHARING", state)
    yield state
    metrics._sharing().clear()
