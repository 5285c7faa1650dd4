"""Select the replica for a session: the one that holds its prompt, unless it is overloaded. No I/O.

Replicas are ranked by the length of the prompt's prefix that they hold. Replicas that hold equally long prefixes
(usually none of the prompt) are ranked by rendezvous hashing of session and URL, so that all gateway replicas choose
the same one for a new session, and removing a replica moves only the sessions on it. The first replica whose load is
within a constant multiple of the pool's mean is selected (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with
Bounded Loads, 2018).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import xxhash

from dps_gateway.upstream.replica import Replica

LOAD_FACTOR: Final = 1.25
"""A replica is skipped if one more request would raise its load above this multiple of the pool's mean (rounded up)."""

NOTHING_HELD: Final[Mapping[str, int]] = MappingProxyType({})


def ranked(
    session: str, replicas: Sequence[Replica], held: Mapping[str, int] = NOTHING_HELD
) -> list[Replica]:
    """The replicas in the session's order of preference.

    held: the tokens of the prompt that a replica has in its own memory, by the replica's id.
    """
    if len(replicas) < 2:
        return list(replicas)
    return sorted(
        replicas,
        key=lambda replica: (
            held.get(replica.id, 0),
            xxhash.xxh3_64_intdigest(f"{session} {replica.url}".encode()),
        ),
        reverse=True,
    )


def preferred(
    session: str | None,
    replicas: Sequence[Replica],
    slots: Callable[[Replica], int],
    held: Mapping[str, int] = NOTHING_HELD,
) -> Replica | None:
    """The replica for one more request, or None if all have as many requests as `slots` returns for them.

    Without a session, it is the least loaded replica. `held` is described at `ranked`.
    """
    free = [replica for replica in replicas if replica.in_flight < slots(replica)]
    if not free:
        return None
    if session is None or len(free) == 1:
        return min(free, key=lambda replica: replica.in_flight)
    total = sum(replica.in_flight for replica in replicas)
    bound = math.ceil(LOAD_FACTOR * (total + 1) / len(replicas))
    order = ranked(session, free, held)
    return next((replica for replica in order if replica.in_flight < bound), order[0])
