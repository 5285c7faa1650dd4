"""A page store that many processes share.

A page that fails verification is a miss and is removed. Pages of other geometries are in other folders, and are neither
read nor removed, except to stay within the limit. No operation clears the store.
"""

import contextlib
import os
import stat
import threading
from collections import Counter
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from dps_sglang.storage.page import HEADER_BYTES, PageError, PageFormat
from dps_sglang.storage.shard import PAGE_SUFFIX, Outcome, Shard

SHARDS = 64
"""Number of shards. It is the same for all writers, because a page's shard is computed from its name."""


@dataclass(frozen=True)
class Limits:
    """Limits of a directory, for all engines that write to it together."""

    total_bytes: int
    minimum_free_bytes: int = 0
    """Free space to leave on the file system."""
    lock_seconds: float = 1.0
    """How long a write waits for other writers before the page is not stored."""


class PageStore:
    """Pages of one geometry in a directory that may hold others as well. Thread-safe.

    A page is looked up by the engine's key. The time of last use is the file's modification time, so all processes
    have the same LRU order. Each shard has an equal part of the limit.
    """

    def __init__(self, root: Path, pages: PageFormat, limits: Limits) -> None:
        self._pages = pages
        part = limits.total_bytes // SHARDS
        self._shards = [
            Shard(root / f"{number:02x}", part, limits.minimum_free_bytes, limits.lock_seconds)
            for number in range(SHARDS)
        ]
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def contains(self, key: str) -> bool:
        """Whether a page with the right header and size is there. Only `get` verifies the payload."""
        path, name = self._locate(key)
        return self._has(path, name)

    def get(self, key: str, into: memoryview) -> bool:
        """Read a page into a writable buffer of the payload's size.

        Returns False if the page is missing or fails verification; the buffer's content is then undefined. A page that
        fails verification is removed.
        """
        path, name = self._locate(key)
        try:
            with _open(path) as file:
                header = file.read(HEADER_BYTES)
                self._pages.check_header(header, name, os.fstat(file.fileno()).st_size)
                if into.nbytes != self._pages.payload_bytes or file.readinto(into) != into.nbytes:
                    raise PageError("short read")
                self._pages.check_payload(header, into)
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())
        except OSError as error:
            self._count("missing" if isinstance(error, FileNotFoundError) else "read_error")
            return False
        except PageError:
            self._remove(path)
            return False
        self._count("read")
        return True

    def put(self, key: str, payload: bytes | memoryview) -> Outcome:
        """Store a page, unless it is already stored. File system errors are counted, not raised.

        Raises PageError if the payload does not have the geometry's size.
        """
        path, name = self._locate(key)
        payload = memoryview(payload)
        header = self._pages.header(name, payload)
        if self._has(path, name):
            with contextlib.suppress(OSError):
                os.utime(path)
            outcome = Outcome.PRESENT
        else:
            try:
                outcome = self._shard(name).put(path, (header, payload))
            except OSError:
                outcome = Outcome.WRITE_ERROR
        self._count(outcome.value)
        return outcome

    def counts(self) -> dict[str, int]:
        """Pages by outcome since the start of this process."""
        with self._lock:
            counts = dict(self._counts)
        return counts | {"evicted": sum(shard.evicted_pages for shard in self._shards)}

    def _shard(self, name: bytes) -> Shard:
        return self._shards[name[0] % SHARDS]

    def _locate(self, key: str) -> tuple[Path, bytes]:
        name = self._pages.name(key)
        return self._shard(name).folder / self._pages.folder / f"{name.hex()}{PAGE_SUFFIX}", name

    def _has(self, path: Path, name: bytes) -> bool:
        try:
            with _open(path) as file:
                self._pages.check_header(file.read(HEADER_BYTES), name, os.fstat(file.fileno()).st_size)
        except OSError:
            return False
        except PageError:
            self._remove(path)
            return False
        return True

    def _remove(self, path: Path) -> None:
        """Remove a page that failed verification, so that the next engine that computes it writes it again."""
        self._count("rejected")
        with contextlib.suppress(OSError):
            path.unlink()

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1


def _open(path: Path) -> FileIO:
    """A page's file, unbuffered. Raises OSError, and PageError for anything other than a regular file.

    Anyone who can write to the volume could create a link, or a named pipe, on which an ordinary open would block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PageError("not a regular file")
    return FileIO(descriptor)
