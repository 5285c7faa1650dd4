"""A queue with priorities that is fair between tenants, and between the sessions of one. This module performs no I/O.

Within a priority, tenants take turns, and within a tenant its sessions do; the requests of one session are in order of
arrival. A burst of one tenant therefore delays another tenant's next request by one request at most (Nagle: On Packet
Switches with Infinite Storage, RFC 970, 1985).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

DEFAULT_URGENCY: Final = 3
"""The urgency of a request that states none, as in RFC 9218."""


@dataclass(eq=False, slots=True, kw_only=True)
class Queued:
    """What determines the place of an entry of the queue."""

    tenant: str = ""
    session: str | None = None
    """Each entry without a session counts as a separate one."""
    urgency: int = DEFAULT_URGENCY
    """Entries with a smaller number are served first: from 0 to 7, as in RFC 9218."""


T = TypeVar("T", bound=Queued)

_Tenant = OrderedDict[object, OrderedDict[T, None]]


class FairQueue(Generic[T]):
    """Iterates over its entries in the order in which they are to be served: the most urgent first, and fairly.

    Adding, serving and removing an entry takes constant time, as does finding the first one.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, _Tenant[T]]] = {}
        """The entries by their urgency. None of the parts is empty."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        """The entries in service order. The queue must not be changed before the iteration has ended."""
        for urgency in sorted(self._levels):
            yield from _in_turns(_in_turns(tenant.values()) for tenant in self._levels[urgency].values())

    def add(self, entry: T) -> None:
        """Append an entry. A tenant or session without other entries of this urgency takes its turn last."""
        sessions = self._levels.setdefault(entry.urgency, OrderedDict()).setdefault(
            entry.tenant, OrderedDict()
        )
        sessions.setdefault(_session_key(entry), OrderedDict())[entry] = None
        self._size += 1

    def remove(self, entry: T, *, served: bool = False) -> bool:
        """Remove an entry, if it is in the queue. Returns whether it was.

        If it is being served, its tenant and session take their next turns last.
        """
        level = self._levels.get(entry.urgency, OrderedDict())
        sessions = level.get(entry.tenant, OrderedDict())
        entries = sessions.get(_session_key(entry), OrderedDict())
        if entry not in entries:
            return False
        del entries[entry]
        self._size -= 1
        if not entries:
            del sessions[_session_key(entry)]
        elif served:
            sessions.move_to_end(_session_key(entry))
        if not sessions:
            del level[entry.tenant]
        elif served:
            level.move_to_end(entry.tenant)
        if not level:
            del self._levels[entry.urgency]
        return True

    def displaced_by(self, tenant: str, urgency: int = DEFAULT_URGENCY) -> T | None:
        """The entry to remove from a full queue in favour of a new one of `tenant`; None if the new one is refused.

        It is the last entry of the tenant with the most entries of the lowest priority: in favour of the same priority
        only if that tenant would still have at least as many.
        """
        lowest = max(self._levels, default=urgency)
        if lowest < urgency or lowest not in self._levels:
            return None
        level = self._levels[lowest]
        sizes = {name: sum(map(len, sessions.values())) for name, sessions in level.items()}
        longest = max(sizes, key=sizes.__getitem__)
        if lowest == urgency and sizes[longest] <= sizes.get(tenant, 0) + 1:
            return None
        session = next(reversed(level[longest].values()))
        return next(reversed(session))


def _session_key(entry: T) -> object:
    return entry if entry.session is None else entry.session


def _in_turns(groups: Iterable[Iterable[T]]) -> Iterator[T]:
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
