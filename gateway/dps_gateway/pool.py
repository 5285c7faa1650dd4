"""The two pools that a turn can be routed to, and the ids of their replicas. This module performs no I/O.

`upstream/engine_pool.py` contains the replicas of a pool.
"""

import base64
import hashlib
from enum import StrEnum
from functools import lru_cache
from typing import Final

ID_CHARS: Final = 4
"""Two of 100 replicas have the same id with a probability of 0.03 %. Each then counts as holding what the other does,
until the engines' reports correct the record."""


class Pool(StrEnum):
    """The pool of engines that a turn is routed to."""

    SPECULATIVE = "speculative"
    GREEDY = "greedy"

    @property
    def other(self) -> "Pool":
        return Pool.GREEDY if self is Pool.SPECULATIVE else Pool.SPECULATIVE


@lru_cache(maxsize=4096)
def replica_id(url: str) -> str:
    """The id by which session records refer to the replica with this base URL; the same in all gateways."""
    return base64.urlsafe_b64encode(hashlib.blake2b(url.encode(), digest_size=3).digest()).decode()
