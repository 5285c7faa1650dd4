"""A bounded in-process copy of session state: the fallback while Redis is unavailable."""

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple


class _Entry(NamedTuple):
    value: bytes
    expires: float


class Mirror:
    """A bounded cache that removes the entry that was set least recently, and whose entries expire after their TTL.

    It is neither shared between processes nor durable. Entries that Redis does not have yet are marked as unwritten.
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
        """The value, or None if there is none that has not expired."""
        entry = self._entries.get(key)
        return entry.value if entry is not None and entry.expires >= self._clock() else None

    def unwritten(self, key: str) -> bytes | None:
        """The value if it is unwritten, else None."""
        return self.get(key) if key in self._unwritten else None

    def unwritten_keys(self, limit: int) -> list[str]:
        """At most `limit` keys of unwritten entries, those set least recently."""
        keys = list(islice(self._unwritten, limit))
        for key in keys:
            if self.get(key) is None:  # expired
                del self._unwritten[key]
        return [key for key in keys if key in self._unwritten]

    def put(self, key: str, value: bytes, ttl_seconds: int, *, written: bool) -> None:
        """Set a value. written: whether Redis has it, or is not used."""
        self.delete(key)
        self._entries[key] = _Entry(value, self._clock() + ttl_seconds)
        if not written:
            self._unwritten[key] = None
        while len(self._entries) > self._max_entries:
            self.delete(next(iter(self._entries)))

    def delete(self, key: str) -> None:
        """Delete an entry, if it exists."""
        self._unwritten.pop(key, None)
        self._entries.pop(key, None)
