"""Requests that a replica has not begun to answer, which are given up if it stops responding."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dps_gateway.upstream.replica import Replica


class ReplicaLost(Exception):
    """The replica stopped responding before it began to answer a request."""


class Unanswered:
    """The requests of one pool that wait for the beginning of their answers."""

    def __init__(self) -> None:
        self._limits: defaultdict[Replica, set[asyncio.Timeout]] = defaultdict(set)

    @asynccontextmanager
    async def waiting(self, replica: Replica) -> AsyncIterator[None]:
        """The context in which a request waits. Raises ReplicaLost if it is given up."""
        limits = self._limits[replica]
        try:
            async with asyncio.timeout(None) as limit:
                limits.add(limit)
                try:
                    yield
                finally:
                    limits.discard(limit)
                    if not limits and self._limits.get(replica) is limits:
                        del self._limits[replica]
        except TimeoutError as error:
            raise ReplicaLost("the engine stopped responding before it answered") from error

    def give_up(self, replica: Replica) -> None:
        """End the wait of all requests that the replica has not begun to answer."""
        now = asyncio.get_running_loop().time()
        limits = self._limits.pop(replica, set())
        while limits:
            limits.pop().reschedule(now)
