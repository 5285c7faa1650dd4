"""The measurement of a directory's bandwidth when an engine starts."""

from pathlib import Path

import pytest

from dps_sglang.storage import probe
from dps_sglang.storage.probe import measure

BLOCK_BYTES = 64 * 1024
MANY_BYTES = 2**62


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "BYTES", 512 * 1024)


def test_bandwidth_is_measured_and_no_file_remains(tmp_path: Path) -> None:
    directory = tmp_path / "not created yet"
    found = measure(directory, BLOCK_BYTES, threads=2)
    assert found is not None
    assert min(found.read, found.write) > 0
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("block_bytes", [1, 1000, 10**9], ids=["small", "odd", "larger than all files"])
def test_pages_of_any_size_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(probe, "BYTES", 8192)
    assert measure(tmp_path, block_bytes, threads=2) is not None


def test_time_limit_ends_the_measurement_after_one_block_per_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.0)
    found = measure(tmp_path, BLOCK_BYTES, threads=2)
    assert found is not None
    assert found.write > 0


def test_free_space_that_is_reserved_is_not_used(tmp_path: Path) -> None:
    assert measure(tmp_path, BLOCK_BYTES, threads=2, minimum_free_bytes=MANY_BYTES) is None


def test_directory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        measure(tmp_path / "file", BLOCK_BYTES, threads=2)


def test_disk_without_space_is_not_measured(small_disk: Path) -> None:
    (small_disk / "pages").write_bytes(bytes(900 * 1024))
    assert measure(small_disk, BLOCK_BYTES, threads=2) is None
