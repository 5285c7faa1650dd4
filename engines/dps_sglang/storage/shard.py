"""One part of a shared page store: a directory whose size is limited, for all processes that write to it.

A writer holds the shard's lock from before its first byte until after the rename. The limit therefore covers
unfinished files as well, and an unfinished file that is found under the lock was left by a process that was killed.
The lock file also stores the number of bytes in use. During a write it is marked as unknown, so that if the writer is
killed, the next one scans the directory.
"""

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PAGE_SUFFIX = ".page"
UNFINISHED_SUFFIX = ".tmp"
LOCK_NAME = "lock"
LEDGER = struct.Struct("<QQ")
"""The bytes in use and their bitwise complement. If the two do not match, the bytes in use are unknown."""
COMPLEMENT = 2**64 - 1
FREED_SHARE = 0.1
"""Minimum fraction of the bytes in use, or of the limit if it is lower, that an eviction frees. It keeps directory
scans rare."""
RETRY_SECONDS = 0.002
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_SPACE = (*DISK_FULL, errno.EFBIG)
USELESS_SECONDS = 60.0
"""How long no pages are evicted for a full disk, or for the minimum of free space, after an eviction that did not help,
for example because snapshots keep the space, or because the quota also counts the files of other users."""


class Outcome(Enum):
    """The result of storing a page."""

    STORED = "stored"
    PRESENT = "present"
    TOO_LARGE = "too_large"
    BUSY = "busy"
    FULL = "full"
    WRITE_ERROR = "write_error"


@dataclass(frozen=True)
class Usage:
    """The pages of a shard, least recently used first, and their bytes."""

    pages: Sequence[tuple[int, int, str]]
    """Time of last use in ns, size in bytes, path."""
    total: int


class Shard:
    """A directory with one folder per geometry, and a limit in bytes for all of them."""

    def __init__(
        self, folder: Path, limit_bytes: int, minimum_free_bytes: int = 0, lock_seconds: float = 1.0
    ) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.minimum_free_bytes = minimum_free_bytes
        self.lock_seconds = lock_seconds
        self.evicted_pages = 0
        self._useless_until = 0.0
        """The time on the monotonic clock until which evictions are not expected to free space on the disk."""

    def put(self, path: Path, parts: Sequence[bytes | memoryview]) -> Outcome:
        """Write a page to `path`, a file in a folder of this shard, evicting others if necessary.

        Raises OSError if the file system fails for a reason other than lack of space.
        """
        size = sum(memoryview(part).nbytes for part in parts)
        if size > self.limit_bytes:
            return Outcome.TOO_LARGE
        try:
            with self._locked() as lock:
                if lock is None:
                    return Outcome.BUSY
                return self._put_locked(lock, path, parts, size)
        except OSError as error:
            if error.errno in NO_SPACE:
                return Outcome.FULL
            raise

    def _put_locked(self, lock: int, path: Path, parts: Sequence[bytes | memoryview], size: int) -> Outcome:
        used = _read_ledger(lock)
        replaced = _size(path)
        if used is None or self._excess(used - replaced + size, size) > 0:
            below_limit = used is not None and used - replaced + size <= self.limit_bytes
            if below_limit and time.monotonic() < self._useless_until:
                return Outcome.FULL
            used = self._evict(size)
            replaced = _size(path)
            if self._excess(used - replaced + size, size) > 0:
                # The limit now permits the page, so it is the file system that still has too little free space.
                self._useless_until = time.monotonic() + USELESS_SECONDS
                _write_ledger(lock, used)
                return Outcome.FULL
        _write_ledger(lock, None)
        try:
            _replace(path, parts)
        except OSError as error:
            if error.errno not in DISK_FULL or time.monotonic() < self._useless_until:
                _write_ledger(lock, used)
                raise
            # Other data fill the disk or the quota. The least recently used pages make room for the new one.
            used = self._evict(size, disk_full=True)
            _write_ledger(lock, used)
            replaced = _size(path)
            try:
                _replace(path, parts)
            except OSError:
                self._useless_until = time.monotonic() + USELESS_SECONDS
                raise
        _write_ledger(lock, max(0, used - replaced) + size)
        return Outcome.STORED

    def _excess(self, used: int, size: int) -> int:
        """Bytes above the limit, or below the minimum of free space, once `size` bytes are written."""
        excess = used - self.limit_bytes
        if self.minimum_free_bytes:
            stat = os.statvfs(self.folder)
            excess = max(excess, self.minimum_free_bytes + size - stat.f_bavail * stat.f_frsize)
        return excess

    def _evict(self, size: int, disk_full: bool = False) -> int:
        """Remove the least recently used pages until `size` bytes fit, and return the bytes in use.

        disk_full: whether a page of this size has just failed to be written, although the limits permit it.
        """
        usage = self.scan()
        used = usage.total
        excess = max(self._excess(used + size, size), size if disk_full else 0)
        if excess <= 0:
            return used
        target = used - max(excess, int(min(self.limit_bytes, used) * FREED_SHARE))
        for _, page_bytes, page in usage.pages:
            if used <= target:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(page)
                self.evicted_pages += 1
            used -= page_bytes
        return used

    def scan(self) -> Usage:
        """Count the pages, and remove unfinished files and empty folders. Call it with the lock held."""
        pages: list[tuple[int, int, str]] = []
        for folder in [
            entry.path for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)
        ]:
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.name.endswith(UNFINISHED_SUFFIX):
                        os.unlink(entry.path)
                    elif entry.name.endswith(PAGE_SUFFIX):
                        stat = entry.stat(follow_symlinks=False)
                        pages.append((stat.st_mtime_ns, stat.st_size, entry.path))
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        pages.sort()
        return Usage(pages, sum(size for _, size, _ in pages))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int | None]:
        """The descriptor of the locked lock file, or None if others hold the lock for too long."""
        deadline = time.monotonic() + self.lock_seconds
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(
                self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660
            )
            try:
                if _try_lock(lock) and _is_current(lock, self.folder / LOCK_NAME):
                    yield lock
                    return
            finally:
                os.close(lock)
            if time.monotonic() > deadline:
                yield None
                return
            time.sleep(RETRY_SECONDS)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_current(lock: int, path: Path) -> bool:
    """Whether the locked file is still the one at `path`. The folder may have been deleted in the meantime."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _read_ledger(lock: int) -> int | None:
    data = os.pread(lock, LEDGER.size, 0)
    if len(data) != LEDGER.size:
        return None
    used, complement = LEDGER.unpack(data)
    return int(used) if used == COMPLEMENT - complement else None


def _write_ledger(lock: int, used: int | None) -> None:
    """Record the bytes in use; None marks them as unknown."""
    os.pwrite(lock, LEDGER.pack(used, COMPLEMENT - used) if used is not None else bytes(LEDGER.size), 0)


def _size(path: Path) -> int:
    """The bytes that are freed if the file is replaced: for a link, those of the link itself."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _replace(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file, and give it its name when it is complete. Raises OSError; no unfinished file remains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(UNFINISHED_SUFFIX)
    try:
        _write(unfinished, parts)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a new file without syncing it: a page that a power failure leaves incomplete fails verification later."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660)
    try:
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[os.write(file, left) :]
    finally:
        os.close(file)
