"""The identifier of a shared directory."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dps_sglang.storage.directory import ID_NAME, directory_id


def link(path: Path) -> None:
    target = path.with_name("target")
    target.write_text("0" * 32)
    path.symlink_to(target)


def test_engines_with_the_same_directory_have_the_same_identifier(tmp_path: Path) -> None:
    root = tmp_path / "new/root"
    assert directory_id(root) == directory_id(root)


def test_other_directories_have_other_identifiers(tmp_path: Path) -> None:
    assert directory_id(tmp_path / "one") != directory_id(tmp_path / "other")


@pytest.mark.parametrize("content", [b"", b"\xff", b"x" * 32, b"0" * 33])
def test_damaged_identifier_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ID_NAME).write_bytes(content)
    assert directory_id(tmp_path) == directory_id(tmp_path)


@pytest.mark.parametrize("create", [link, os.mkfifo], ids=["link", "pipe"])
def test_link_or_pipe_in_place_of_the_identifier_is_replaced(
    tmp_path: Path, create: Callable[[Path], None]
) -> None:
    create(tmp_path / ID_NAME)
    assert directory_id(tmp_path) == directory_id(tmp_path) != "0" * 32
    assert not (tmp_path / ID_NAME).is_symlink()


def test_no_file_remains_if_the_identifier_cannot_be_renamed(tmp_path: Path) -> None:
    (tmp_path / ID_NAME).mkdir()
    with pytest.raises(IsADirectoryError):
        directory_id(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [ID_NAME]


def test_no_file_remains_if_the_identifier_cannot_be_written(small_disk: Path) -> None:
    with (small_disk / "other").open("wb") as file, suppress(OSError):
        file.write(bytes(2 * 2**20))
    with pytest.raises(OSError, match="No space left"):
        directory_id(small_disk)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_engines_that_start_at_the_same_time_agree_afterwards(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(directory_id, [tmp_path] * 16))
    assert [path.name for path in tmp_path.iterdir()] == [ID_NAME]
    assert len({directory_id(tmp_path) for _ in range(3)}) == 1


def test_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        directory_id(tmp_path / "file/below")
