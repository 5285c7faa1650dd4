"""The short id of a replica, by which session records refer to it. This module performs no I/O."""

import base64
import hashlib
from functools import lru_cache
from typing import Final

ID_CHARS: Final = 4
"""Two of 100 replicas have the same id with a probability of 0.03 %. Each then counts as holding what the other does,
until the engines' reports correct the record."""


@lru_cache(maxsize=4096)
def replica_id(url: str) -> str:
    """The id of the replica with this base URL, which is the same in all gateway replicas."""
    return base64.urlsafe_b64encode(hashlib.blake2b(url.encode(), digest_size=3).digest()).decode()
