"""A bounded in-process copy of session state: the fallback while Redis is unavailable."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(slots=True)
class _Entry:
    value: bytes
    expires: float
    written: bool


class Mirror:
    """A bounded cache that removes the entry that was set least recently, and whose entries expire after their TTL.

    It is neither shared between processes nor durable.
    """

    def __init__(self, max_entries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unwritten: dict[str, None] = {}
        """The keys of unwritten entries. The one that was set least recently is first."""

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
        return self.get(key) if key in self._unwritten else None

    def put(
        self, key: str, value: bytes, pointer: tuple[str, bytes] | None, ttl_seconds: int, *, written: bool
    ) -> None:
        expires = self._clock() + ttl_seconds
        self._put(key, _Entry(value, expires, written))
        if pointer is not None:
            self._put(pointer[0], _Entry(pointer[1], expires, written))

    def unwritten_keys(self, limit: int) -> list[str]:
        """At most `limit` keys of values not yet written to the authoritative store, those set least recently."""
        keys = list(islice(self._unwritten, limit))
        for key in keys:
            if self.get(key) is None:  # expired
                del self._unwritten[key]
        return [key for key in keys if key in self._unwritten]

    def mark_written(self, key: str, value: bytes, ttl_seconds: int) -> None:
        """Record that `value` is now in the authoritative store."""
        self._put(key, _Entry(value, self._clock() + ttl_seconds, written=True))

    def delete(self, key: str) -> bool:
        self._unwritten.pop(key, None)
        return self._entries.pop(key, None) is not None

    def _put(self, key: str, entry: _Entry) -> None:
        self.delete(key)
        self._entries[key] = entry
        if not entry.written:
            self._unwritten[key] = None
        while len(self._entries) > self._max_entries:
            self.delete(next(iter(self._entries)))
