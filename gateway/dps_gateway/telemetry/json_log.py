"""A log with one line of JSON per entry, in a file of bounded size: the decision log and the access log."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 1.0
MAX_PENDING: Final = 10_000
"""Maximum number of entries in memory. Entries beyond it are dropped: a slow disk must not use up the memory."""

MAX_FILE_BYTES: Final = 128 * 1024 * 1024
"""A file that reaches this size is renamed to `PATH.1`, which replaces the previous `PATH.1`. Files in /dev, such
as /dev/stdout, are not renamed."""

_READ_BYTES: Final = 256 * 1024


class JsonLog:
    """Appends entries to a file, in batches and in a thread, so that a slow or full disk never delays a request.

    The file belongs to one gateway process. `on_dropped` is called with the number of entries that are dropped because
    the file cannot be written fast enough or at all. `name` describes the file in log messages.
    """

    def __init__(
        self,
        path: Path,
        on_dropped: Callable[[int], None] = lambda count: None,
        *,
        name: str = "log",
        max_pending: int = MAX_PENDING,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._path = path
        self._previous = Path(f"{path}.1")
        self._name = name
        self._on_dropped = on_dropped
        self._max_pending = max_pending
        self._max_file_bytes = max_file_bytes if path.parent != Path("/dev") else sys.maxsize
        self._pending: list[Mapping[str, Any]] = []
        self._writable = True
        self._file_in_use = asyncio.Lock()
        """Held while the file is written and renamed, or opened for reading."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Schedule an entry for the next flush."""
        if len(self._pending) < self._max_pending:
            self._pending.append(entry)
        else:
            self._on_dropped(1)

    async def flush(self) -> None:
        """Write the scheduled entries. If that fails, they are dropped, and the first failure in a row is logged."""
        batch, self._pending = self._pending, []
        if not batch:
            return
        try:
            async with self._file_in_use:
                await asyncio.to_thread(self._append, batch)
        except OSError as error:
            self._on_dropped(len(batch))
            if self._writable:
                log.error("the %s %s cannot be written: %s", self._name, self._path, error.strerror)
            self._writable = False
        else:
            self._writable = True

    async def read(self) -> AsyncIterator[bytes]:
        """The content of both files, oldest entries first, with the entries that are scheduled now.

        Entries that are written meanwhile are left out. Raises OSError if the files cannot be opened or read.
        """
        await self.flush()
        with ExitStack() as opened:
            async with self._file_in_use:
                files = await asyncio.to_thread(self._open, opened)
            for file, remaining in files:
                while remaining and (
                    chunk := await asyncio.to_thread(file.read, min(remaining, _READ_BYTES))
                ):
                    remaining -= len(chunk)
                    yield chunk

    def _open(self, opened: ExitStack) -> list[tuple[BinaryIO, int]]:
        """The previous file, if there is one, and the current one, with their sizes."""
        paths = [*([self._previous] if self._previous.exists() else []), self._path]
        files = [opened.enter_context(os.fdopen(_open_private(path, os.O_RDONLY), "rb")) for path in paths]
        return [(file, os.fstat(file.fileno()).st_size) for file in files]

    def _append(self, batch: list[Mapping[str, Any]]) -> None:
        """Append the entries to the file, all or none of them. Raises OSError."""
        rest = memoryview(b"".join(orjson.dumps(entry) + b"\n" for entry in batch))
        with open(self._path, "ab", buffering=0, opener=_open_private) as file:
            size = os.fstat(file.fileno()).st_size
            full = size + len(rest) >= self._max_file_bytes
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)  # part of a line may have been written before the disk was full
                raise
        if full:
            os.replace(self._path, self._previous)


def _open_private(path: str | Path, flags: int) -> int:
    """Open a file, which is created if it does not exist; only its owner can read it."""
    return os.open(path, flags | os.O_CREAT, 0o600)


async def flush_periodically(entries: JsonLog) -> None:
    """Write the scheduled entries at an interval, until cancelled."""
    while True:
        await asyncio.sleep(FLUSH_SECONDS)
        await entries.flush()
