"""The most recent decisions of this gateway replica and its requests in progress, for the page on the admin port."""

from collections import deque
from itertools import islice
from typing import Any, Final, Protocol

MAX_RECORDS: Final = 10_000
"""Maximum number of records in memory, each of about 2 KB."""


class InProgress(Protocol):
    """A request that is being served."""

    def progress(self) -> dict[str, Any]:
        """What is known about it so far."""


class Record(Protocol):
    """A request that has ended."""

    @property
    def ids(self) -> tuple[str | None, ...]:
        """The ids by which it is found: `x-dps-session`, the session id that the client sent, and the request id."""

    def document(self) -> dict[str, Any]:
        """What is known about it, as a JSON object. It is made only for readers, since it takes time."""


class Recent:
    """A ring of records."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._records: deque[Record] = deque(maxlen=max_records)
        self.added = 0
        """The number of records that have been added, which is the number of the newest one."""
        self.in_progress: set[InProgress] = set()

    def add(self, record: Record) -> None:
        """Add a record, which replaces the oldest one if the ring is full."""
        self._records.append(record)
        self.added += 1

    def after(self, number: int, limit: int) -> list[Record]:
        """The records with numbers above `number`, oldest first; the newest `limit` of them if there are more."""
        newest_first = islice(reversed(self._records), max(0, min(self.added - number, limit)))
        return list(newest_first)[::-1]

    def of(self, value: str) -> list[Record]:
        """The records of the session or request with this id, oldest first."""
        return [record for record in self._records if value in record.ids]
