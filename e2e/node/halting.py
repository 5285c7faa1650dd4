"""An SGLang plugin that halts an engine in the middle of a page, so that a test can kill it there, or disturbs reading.

If the folder that the environment variable HALTING_REQUESTS names contains a file `write`, the thread that writes the
next page halts when half of it is written; with `fetch`, the thread that fetches the next page halts when that has
arrived. A suffix is then added to the file's name. Other threads continue.

While the folder contains a file `read_error`, the content of no page can be read; with `slow`, reading takes a second
for each page.
"""

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from dps_sglang.storage import shard, store
from dps_sglang.storage.store import PageStore

MOMENTS = ("write", "fetch")
HALTED = ".halted"
"""The suffix of a request's file once a thread has halted."""
READ_ERROR, SLOW = "read_error", "slow"
PAGE_SECONDS = 1.0
METADATA = "Metadata-Version: 2.1\nName: halting\nVersion: 0\n"
ENTRY_POINTS = "[sglang.srt.plugins]\nhalting = halting:register\n"

_write, _get, _open = shard._write, PageStore.get, store._open


def install(folder: Path) -> None:
    """Write this module, and the metadata by which SGLang finds it, to a folder of an engine's PYTHONPATH."""
    (folder / "halting.py").write_text(Path(__file__).read_text())
    metadata = folder / "halting-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    """Called by SGLang in each of its processes."""
    setattr(shard, "_write", write)  # noqa: B010, mypy refuses an assignment
    setattr(PageStore, "get", get)  # noqa: B010
    setattr(store, "_open", disturbed)  # noqa: B010


@contextmanager
def requested(name: str, folder: Path) -> Iterator[None]:
    """Disturb reading until the block exits. name: READ_ERROR or SLOW. folder: the one of an engine's requests."""
    (folder / name).touch()
    try:
        yield
    finally:
        (folder / name).unlink()


class DisturbedFile(FileIO):
    """A page. Its header can always be read."""

    def readinto(self, buffer: Any) -> int:
        """Read the content, or fail."""
        folder = Path(os.environ["HALTING_REQUESTS"])
        if (folder / READ_ERROR).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if (folder / SLOW).exists():
            time.sleep(PAGE_SECONDS)
        return super().readinto(buffer)


def disturbed(path: Path) -> FileIO:
    """Open a page."""
    with _open(path) as file:
        return DisturbedFile(os.dup(file.fileno()))


def write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a page, or half of it."""
    if not _requested("write"):
        _write(path, parts)
        return
    header, payload = parts
    _write(path, (header, memoryview(payload)[: memoryview(payload).nbytes // 2]))
    _halt()


def get(store: PageStore, key: str, into: memoryview) -> bool:
    """Fetch a page, and perhaps never return."""
    found = _get(store, key, into)
    if found and _requested("fetch"):
        _halt()
    return found


def _requested(name: str) -> bool:
    """Whether this thread has to halt. A request is taken by one thread only."""
    folder = Path(os.environ["HALTING_REQUESTS"])
    try:
        (folder / name).rename(folder / f"{name}{HALTED}")
    except FileNotFoundError:
        return False
    return True


def _halt() -> None:
    time.sleep(3600)
