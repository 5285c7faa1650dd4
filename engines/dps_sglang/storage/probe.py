"""How fast a directory stores and returns data, measured with files that are deleted before they are written."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BYTES = 64 * 2**20
"""Maximum size of all files together."""
SECONDS = 2.0
"""Maximum time for writing, and for reading; an operation that has begun is completed."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that a directory stores and returns."""

    write: float
    read: float


def measure(directory: Path, block_bytes: int, threads: int, minimum_free_bytes: int = 0) -> Bandwidth | None:
    """Write blocks to files in the directory, one file per thread, and read them back.

    Where the file system permits it, the data are flushed to the storage, and reading does not return them from the
    operating system's cache. No file remains, even if the process is killed. Returns None if this would leave less than
    `minimum_free_bytes`. Raises OSError if the directory cannot be used.
    """
    directory.mkdir(parents=True, exist_ok=True)
    space = os.statvfs(directory)
    if space.f_bavail * space.f_frsize < minimum_free_bytes + BYTES:
        return None
    blocks = max(1, BYTES // (threads * block_bytes))
    block = memoryview(bytearray(os.urandom(min(block_bytes, BYTES // threads))))  # not compressible
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0)) for _ in range(threads)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        write = _timed(pool, files, lambda file, deadline: _write(file, block, blocks, deadline))
        read = _timed(pool, files, lambda file, deadline: _read(file, len(block), deadline))
    return Bandwidth(write, read)


def _timed(
    pool: ThreadPoolExecutor, files: Sequence[BinaryIO], operation: Callable[[BinaryIO, float], int]
) -> float:
    """Bytes per second of an operation on all files at once. It receives a file and the time by which to end."""
    started = time.perf_counter()
    transferred = sum(pool.map(lambda file: operation(file, started + SECONDS), files))
    return transferred / (time.perf_counter() - started)


def _write(file: BinaryIO, block: memoryview, blocks: int, deadline: float) -> int:
    written = 0
    for _ in range(blocks):
        written += file.write(block)
        if time.perf_counter() >= deadline:
            break
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return written


def _read(file: BinaryIO, block_bytes: int, deadline: float) -> int:
    file.seek(0)
    done = 0
    while time.perf_counter() < deadline and (block := file.read(block_bytes)):
        done += len(block)
    return done
