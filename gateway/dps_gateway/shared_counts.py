"""Counts that are summed over the worker processes of one gateway replica, in shared memory.

Each worker writes its own counts to a file of its own, which the others map into memory. No locks are needed, and the
counts of a worker that has died disappear with its file.
"""

import mmap
import time
from pathlib import Path
from typing import Final

SUFFIX: Final = ".counts"
"""The suffix of the files with the current load."""

MINUTES_SUFFIX: Final = ".minutes"
"""The suffix of the files with what API keys have used per minute. These counts stay for two minutes, and must not
leave the current load without entries."""

NAME_BYTES: Final = 16

MAX_NAMES: Final = 4096
"""The number of names for which a worker can share a count above 0 at the same time. Counts of further
names are not shared."""

_SETTLED_NS: Final = 1_000_000_000

_COUNTS: Final = MAX_NAMES * NAME_BYTES
_COUNT_BYTES: Final = 8
_END: Final = _COUNTS + MAX_NAMES * _COUNT_BYTES
"""The position of the number of entries up to the last one that has been used."""
_SIZE: Final = _END + _COUNT_BYTES


class SharedCounts:
    """This worker's counts, and those in the other workers' files with the same suffix in the same folder."""

    def __init__(self, own: Path) -> None:
        """`own` is the path of this worker's file, which is created. Raises OSError."""
        own.write_bytes(bytes(_SIZE))
        self.path = own
        """The path of this worker's file."""
        with own.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._entries: dict[bytes, int] = {}
        self._free = list(range(MAX_NAMES))[::-1]
        """The indices of the free entries in descending order. The lowest is used first, which shortens searches."""
        self._end = 0
        """The number of entries up to the last one that has been used. Others search no further."""
        self._others: dict[Path, mmap.mmap] = {}
        self._changed_ns = 0

    def publish(self, name: bytes, count: int) -> None:
        """Set this worker's count for a name of NAME_BYTES bytes."""
        entry = self._entries.get(name)
        if entry is None:
            if not count or not self._free:
                return
            entry = self._entries[name] = self._free.pop()
            if entry >= self._end:
                self._end = entry + 1
                self._write(_END, self._end)
        self._write(_COUNTS + entry * _COUNT_BYTES, count)
        if count:
            self._memory[entry * NAME_BYTES : (entry + 1) * NAME_BYTES] = name
        else:
            self._memory[entry * NAME_BYTES : (entry + 1) * NAME_BYTES] = bytes(NAME_BYTES)
            self._free.append(self._entries.pop(name))

    def of_others(self, name: bytes) -> int:
        """The sum of the other workers' counts for a name."""
        self._find_others()
        return sum(_count(memory, name) for memory in self._others.values())

    def others_with(self, name: bytes) -> list[Path]:
        """The paths of the other workers' files in which the count for a name is above 0."""
        self._find_others()
        return [path for path, memory in self._others.items() if _count(memory, name)]

    def close(self) -> None:
        """Unmap all files."""
        for memory in (self._memory, *self._others.values()):
            memory.close()

    def _write(self, start: int, number: int) -> None:
        self._memory[start : start + _COUNT_BYTES] = number.to_bytes(_COUNT_BYTES, "little")

    def _find_others(self) -> None:
        """Map the files of new workers, and forget those of workers that have ended."""
        changed_ns = self.path.parent.stat().st_mtime_ns
        if changed_ns == self._changed_ns:
            return
        files = set(self.path.parent.glob(f"*{self.path.suffix}")) - {self.path}
        for gone in self._others.keys() - files:
            self._others.pop(gone).close()
        complete = True
        for new in files - self._others.keys():
            try:
                with new.open("rb") as file:
                    self._others[new] = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
            except (OSError, ValueError):
                # It is being created or removed, or there is no file descriptor left. The next call tries again.
                complete = False
        # Two files that are created in quick succession can leave the folder with the same modification time.
        settled = time.time_ns() - changed_ns > _SETTLED_NS
        self._changed_ns = changed_ns if complete and settled else 0


def _count(memory: mmap.mmap, name: bytes) -> int:
    at = memory.find(name, 0, _number(memory, _END) * NAME_BYTES)
    return 0 if at == -1 else _number(memory, _COUNTS + at // NAME_BYTES * _COUNT_BYTES)


def _number(memory: mmap.mmap, start: int) -> int:
    return int.from_bytes(memory[start : start + _COUNT_BYTES], "little")
