"""Queues that are fair between tenants, and between the sessions of one tenant. This module performs no I/O.

Tenants take turns, and within a tenant its sessions do; the requests of one session are in order of arrival. A burst
of one tenant therefore delays another tenant's next request by one request at most (Nagle: On Packet Switches with
Infinite Storage, RFC 970, 1985).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final, Generic, TypeVar

T = TypeVar("T")

DEFAULT_URGENCY: Final = 3
"""The urgency of a request that states none, as in RFC 9218."""


@dataclass(eq=False, frozen=True, slots=True)
class Entry(Generic[T]):
    """An item in the queue."""

    tenant: str
    session: str | None
    """The item's session. Each item without one counts as a separate session."""
    item: T
    urgency: int = DEFAULT_URGENCY
    """Entries with a smaller number are served first."""


_Session = OrderedDict[Entry[T], None]
_Tenant = OrderedDict[object, _Session[T]]


class FairQueue(Generic[T]):
    """Iterates over its entries in the order in which they are to be served.

    Adding, serving and removing an entry takes constant time, as does finding the first one.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant[T]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry[T]]:
        """The entries in service order. The queue must not be changed before the iteration has ended."""
        return _in_turns(_in_turns(tenant.values()) for tenant in self._tenants.values())

    def add(self, entry: Entry[T]) -> None:
        """Append an entry. A tenant or session without other entries takes its turn last."""
        sessions = self._tenants.setdefault(entry.tenant, OrderedDict())
        sessions.setdefault(_session_key(entry), OrderedDict())[entry] = None
        self._sizes[entry.tenant] = self._sizes.get(entry.tenant, 0) + 1
        self._size += 1

    def serve(self, entry: Entry[T]) -> bool:
        """Remove an entry that is being served. Its tenant and session take their next turns last.

        Returns whether it was in the queue.
        """
        removed = self.remove(entry)
        if removed and entry.tenant in self._tenants:
            self._tenants.move_to_end(entry.tenant)
            sessions = self._tenants[entry.tenant]
            if _session_key(entry) in sessions:
                sessions.move_to_end(_session_key(entry))
        return removed

    def remove(self, entry: Entry[T]) -> bool:
        """Remove an entry that will not be served. Returns whether it was in the queue."""
        sessions = self._tenants.get(entry.tenant, OrderedDict())
        session = sessions.get(_session_key(entry), OrderedDict())
        if entry not in session:
            return False
        del session[entry]
        self._size -= 1
        self._sizes[entry.tenant] -= 1
        if not session:
            del sessions[_session_key(entry)]
        if not sessions:
            del self._tenants[entry.tenant], self._sizes[entry.tenant]
        return True

    def displaced_by(self, tenant: str) -> Entry[T] | None:
        """The entry to remove from a full queue in favour of a new one of `tenant`; None if the new one is refused.

        It is the last entry of the tenant with the most entries, if that tenant would still have at least as many.
        """
        longest = max(self._sizes, key=self._sizes.__getitem__, default=None)
        if longest is None or self._sizes[longest] <= self._sizes.get(tenant, 0) + 1:
            return None
        return self._last_of(longest)

    def last(self) -> Entry[T] | None:
        """The last entry of the tenant with the most entries."""
        longest = max(self._sizes, key=self._sizes.__getitem__, default=None)
        return None if longest is None else self._last_of(longest)

    def _last_of(self, tenant: str) -> Entry[T]:
        session = next(reversed(self._tenants[tenant].values()))
        return next(reversed(session))


class PriorityQueue(Generic[T]):
    """One FairQueue for each urgency. Entries with a smaller number are served first."""

    def __init__(self) -> None:
        self._queues: dict[int, FairQueue[T]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Entry[T]]:
        """The entries in service order. The queue must not be changed before the iteration has ended."""
        return chain.from_iterable(self._queues[urgency] for urgency in sorted(self._queues))

    def add(self, entry: Entry[T]) -> None:
        """Append an entry to the queue of its urgency."""
        self._queues.setdefault(entry.urgency, FairQueue()).add(entry)

    def serve(self, entry: Entry[T]) -> bool:
        """Remove an entry that is being served. Returns whether it was in the queue."""
        queue = self._queues.get(entry.urgency)
        return queue is not None and queue.serve(entry)

    def remove(self, entry: Entry[T]) -> bool:
        """Remove an entry that will not be served. Returns whether it was in the queue."""
        queue = self._queues.get(entry.urgency)
        return queue is not None and queue.remove(entry)

    def displaced_by(self, tenant: str, urgency: int) -> Entry[T] | None:
        """The entry to remove from a full queue in favour of a new one; None if the new one is refused.

        Only entries of the lowest priority are removed, in favour of any with a higher one.
        """
        lowest = max((each for each, queue in self._queues.items() if len(queue)), default=urgency)
        if lowest < urgency or lowest not in self._queues:
            return None
        queue = self._queues[lowest]
        return queue.last() if lowest > urgency else queue.displaced_by(tenant)


def _session_key(entry: Entry[T]) -> object:
    return entry if entry.session is None else entry.session


def _in_turns(groups: Iterable[Iterable[Entry[T]]]) -> Iterator[Entry[T]]:
    """The first entry of every group, then the second of every group, and so on. No group is read ahead."""
    rest = []
    for group in groups:
        entries = iter(group)
        for entry in entries:
            yield entry
            rest.append(entries)
            break
    while rest:
        again = []
        for entries in rest:
            for entry in entries:
                yield entry
                again.append(entries)
                break
        rest = again
