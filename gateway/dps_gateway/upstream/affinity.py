"""Which replica of a pool takes a session: always the same one, unless it is overloaded. Pure.

Rendezvous hashing with bounded load: a session's replicas are ranked by hash, so that a replica that comes or goes
moves only its own sessions, and the first whose load is within a factor of the pool's mean is taken
(Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, 2018).
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import xxhash

LOAD_FACTOR: Final = 1.25


class Loaded(Protocol):
    """A replica as the choice sees it."""

    @property
    def url(self) -> str: ...

    @property
    def in_flight(self) -> int: ...


R = TypeVar("R", bound=Loaded)


def ranked(session: str, replicas: Sequence[R]) -> list[R]:
    """The replicas in this session's own order of preference."""
    if len(replicas) < 2:
        return list(replicas)
    return sorted(
        replicas,
        key=lambda replica: xxhash.xxh3_64_intdigest(f"{session} {replica.url}".encode()),
        reverse=True,
    )


def preferred(session: str | None, replicas: Sequence[R], max_in_flight: int) -> R | None:
    """The replica for one more request, or None if all of them are full.

    Without a session the least loaded one. `max_in_flight` bounds each replica.
    """
    free = [replica for replica in replicas if replica.in_flight < max_in_flight]
    if not free:
        return None
    if session is None or len(free) == 1:
        return min(free, key=lambda replica: replica.in_flight)
    total = sum(replica.in_flight for replica in replicas)
    bound = math.ceil(LOAD_FACTOR * (total + 1) / len(replicas))
    order = ranked(session, free)
    return next((replica for replica in order if replica.in_flight < bound), order[0])
