"""A bounded in-process copy of session state: the fallback while Redis is unavailable."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    value: bytes
    expires: float
    written: bool


class Mirror:
    """An LRU cache whose entries expire after their TTL. It is neither shared between processes nor durable."""

    def __init__(self, max_entries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unwritten = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None or entry.expires < self._clock():
            return None
        return entry.value

    def values(self, keys: Iterable[str]) -> dict[str, bytes]:
        """The cached values of `keys`; missing keys are omitted."""
        return {key: value for key in keys if (value := self.get(key)) is not None}

    def unwritten(self, key: str) -> bytes | None:
        """The value if it has not been written to the authoritative store yet, else None."""
        if not self._unwritten:
            return None
        entry = self._entries.get(key)
        return None if entry is None or entry.written or entry.expires < self._clock() else entry.value

    def put(
        self, key: str, value: bytes, pointer: tuple[str, bytes] | None, ttl_seconds: int, *, written: bool
    ) -> None:
        expires = self._clock() + ttl_seconds
        self._put(key, _Entry(value, expires, written))
        if pointer is not None:
            self._put(pointer[0], _Entry(pointer[1], expires, written))

    def unwritten_keys(self) -> list[str]:
        """Keys of values not yet written to the authoritative store, least recently used first."""
        if not self._unwritten:
            return []
        return [key for key in self._entries if self.unwritten(key) is not None]

    def mark_written(self, key: str, value: bytes, ttl_seconds: int) -> None:
        """Record that `value` is now in the authoritative store."""
        self._put(key, _Entry(value, self._clock() + ttl_seconds, written=True))

    def delete(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        self._count(entry, -1)
        return entry is not None

    def _put(self, key: str, entry: _Entry) -> None:
        self._count(self._entries.pop(key, None), -1)
        self._entries[key] = entry
        self._count(entry, +1)
        while len(self._entries) > self._max_entries:
            self._count(self._entries.popitem(last=False)[1], -1)

    def _count(self, entry: _Entry | None, change: int) -> None:
        if entry is not None and not entry.written:
            self._unwritten += change
