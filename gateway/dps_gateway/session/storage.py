"""Interfaces of the places where session state is stored: a shared key-value store, and the other gateways."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

DROPPED_POINTER_TTL_SECONDS: Final = 300
"""The time after which the pointer to a point that has been dropped from the session's record expires, in seconds.
Until then, conversations that continue from it are recognised."""


class StoreUnavailable(Exception):
    """The backend timed out or returned an error."""


class ForeignValue(StoreUnavailable):
    """The key holds a value of another type, which this project did not write."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The first pointer found: its index among the keys, its value, and the record that it refers to."""

    rank: int
    pointer: bytes
    record: bytes | None


class Backend(Protocol):
    """A shared key-value store. Every method has a short timeout, and raises StoreUnavailable if it fails."""

    async def get(self, key: str) -> bytes | None: ...

    async def find(self, pointer_keys: list[str], record_prefix: str) -> Hit | None: ...

    async def swap(
        self,
        key: str,
        expected: bytes | None,
        value: bytes,
        ttl_seconds: int,
        pointer: tuple[str, bytes] | None,
        dropped: Sequence[str] = (),
    ) -> tuple[bool, bytes | None]:
        """Compare and set: replace `expected` with `value` and write `pointer`.

        dropped: keys of pointers that expire within DROPPED_POINTER_TTL_SECONDS if they point to the same session as
        `pointer`.

        Returns (True, None), or (False, the current value) if it is not `expected`.
        """

    async def delete(self, keys: Sequence[str]) -> bool:
        """Delete keys of one session. Returns whether any existed."""


class Peers(Protocol):
    """The other gateway replicas."""

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        """Each peer's cached values of `keys`. Peers that time out contribute nothing. Never raises."""

    async def publish(self, entries: dict[str, bytes]) -> None:
        """Push entries that could not be written to Redis. Peers that time out are skipped. Never raises."""

    async def forget(self, keys: Sequence[str]) -> None:
        """Remove the cached values of `keys`. Peers that time out are skipped. Never raises."""
