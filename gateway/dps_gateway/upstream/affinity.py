"""Select the replica for a session: always the same one, unless it is overloaded. This module performs no I/O.

Rendezvous hashing with bounded load: replicas are ranked by a hash of session and URL, so that adding or removing a
replica moves only the sessions on it. The first replica whose load is within a constant multiple of the pool's mean is
selected (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, 2018).
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import xxhash

LOAD_FACTOR: Final = 1.25
"""A replica is skipped if one more request would raise its load above this multiple of the pool's mean (rounded up)."""


class Loaded(Protocol):
    """The properties of a replica that the selection depends on."""

    @property
    def url(self) -> str: ...

    @property
    def in_flight(self) -> int: ...


R = TypeVar("R", bound=Loaded)


def ranked(session: str, replicas: Sequence[R]) -> list[R]:
    """The replicas in the session's order of preference."""
    if len(replicas) < 2:
        return list(replicas)
    return sorted(
        replicas,
        key=lambda replica: xxhash.xxh3_64_intdigest(f"{session} {replica.url}".encode()),
        reverse=True,
    )


def preferred(session: str | None, replicas: Sequence[R], max_in_flight: int) -> R | None:
    """The replica for one more request, or None if all have `max_in_flight` requests.

    Without a session, it is the least loaded replica.
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
