"""Downloads from registries: caching, and bundled files as a fallback."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dps_local.assets import FetchError, cached


def assets_module(cache: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m dps_lab.workload.assets` without npm, and with a pip that cannot reach an index."""
    environment = os.environ | {"DPS_CACHE_DIR": str(cache), "PATH": str(path), "PIP_NO_INDEX": "1"}
    return subprocess.run(
        [sys.executable, "-m", "dps_lab.workload.assets"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_bundled_files_are_used_and_named_if_downloads_fail(tmp_path: Path) -> None:
    done = assets_module(cache=tmp_path / "cache", path=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            "tokenizer: the bundled 4k-token tokenizer, not Qwen's own (npm is not installed)",
            "sessions: the bundled sample sessions, not BFCL "
            f"({Path(sys.executable).name} could not fetch it, exit status 1)",
        ],
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPS_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_failed_download_leaves_nothing_behind(cache: Path) -> None:
    def fetch(scratch: Path, target: Path) -> None:
        (target / "half").write_text("")
        raise FetchError("the line broke")

    with pytest.raises(FetchError, match="the line broke"):
        cached("thing", fetch)
    assert list(cache.iterdir()) == []


def test_concurrent_downloads_produce_one_complete_folder(cache: Path) -> None:
    together = threading.Barrier(4)

    def fetch(scratch: Path, target: Path) -> None:
        (target / "content").write_text("whole")
        together.wait()  # all four folders are filled before the first one is renamed

    with ThreadPoolExecutor(4) as pool:
        found = {future.result() for future in [pool.submit(cached, "thing", fetch) for _ in range(4)]}
    assert found == {cache / "thing"}
    assert {path: path.read_text() for path in cache.rglob("*") if path.is_file()} == {
        cache / "thing" / "content": "whole"
    }
