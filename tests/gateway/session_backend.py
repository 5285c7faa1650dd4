"""A session backend for tests, with a dictionary in place of Redis."""

import asyncio
from collections.abc import Sequence

from dps_gateway.session.redis import ForeignValue, Hit, RedisBackend, StoreUnavailable


class FakeBackend(RedisBackend):
    """It can be unavailable, full or slow, and `values` can be changed between a
    read and a commit as another gateway would.

    unavailable: every call fails. full: every write fails. timeouts: how many writes time out before one succeeds.
    foreign: keys that hold a value of another type. answered: an event after which successful writes
    are answered; None if they are answered at once.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.unavailable = False
        self.full = False
        self.timeouts = 0
        self.foreign: set[str] = set()
        self.answered: asyncio.Event | None = None

    async def get(self, key: str) -> bytes | None:
        self._check()
        if key in self.foreign:
            raise ForeignValue("WRONGTYPE")
        return self.values.get(key)

    async def find(self, pointer_keys: list[str], record_prefix: str) -> Hit | None:
        self._check()
        for rank, key in enumerate(pointer_keys):
            if key in self.values:
                session = self.values[key].split(b'"')[1].decode()
                return Hit(rank, self.values[key], self.values.get(record_prefix + session))
        return None

    async def set(self, key: str, value: bytes, ttl_seconds: int) -> None:
        self._check_writable()
        self.values[key] = value

    async def swap(
        self,
        key: str,
        expected: bytes | None,
        value: bytes,
        ttl_seconds: int,
        pointer: tuple[str, bytes] | None = None,
    ) -> tuple[bool, bytes | None]:
        self._check_writable()
        if self.values.get(key) != expected:
            return False, self.values.get(key)
        self.values[key] = value
        if pointer is not None:
            self.values[pointer[0]] = pointer[1]
        if self.answered is not None:
            await self.answered.wait()
        return True, None

    async def delete(self, keys: Sequence[str]) -> bool:
        self._check()
        return sum(self.values.pop(key, None) is not None for key in keys) > 0

    def _check_writable(self) -> None:
        self._check()
        if self.full:
            raise StoreUnavailable("OOM")
        if self.timeouts:
            self.timeouts -= 1
            raise StoreUnavailable("no answer in time")

    def _check(self) -> None:
        if self.unavailable:
            raise StoreUnavailable("unavailable")
