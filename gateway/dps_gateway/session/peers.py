"""The other replicas of this gateway: asked for what they have in mind, and told what Redis did not take."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import aiohttp
import orjson

PATH: Final = "/mirror"
"""On the admin port. POST: an array of keys in, an object of those that are known out. PUT: such an object in."""
LONGEST_WAIT_SECONDS: Final = 0.25
"""A replica that has died is asked until its endpoint is gone; a request waits no longer for it than this."""


class HttpPeers:
    """Asks every replica's admin port at once. It may be one of them itself: what it says then is no news."""

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LONGEST_WAIT_SECONDS))

    def set_endpoints(self, urls: Iterable[str]) -> None:
        """Take in what discovery found: base URLs of admin ports."""
        self._urls = tuple(urls)

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        """What each replica knows of these keys. Who does not answer in time has nothing."""
        return await asyncio.gather(*(self._ask(url, orjson.dumps(keys)) for url in self._urls))

    async def tell(self, entries: dict[str, bytes]) -> None:
        """Have every replica keep these in mind. Who does not answer in time is not told."""
        body = orjson.dumps({key: value.decode() for key, value in entries.items()})
        await asyncio.gather(*(self._tell(url, body) for url in self._urls))

    async def close(self) -> None:
        await self._session.close()

    async def _tell(self, url: str, body: bytes) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._session.put(url + PATH, data=body) as response:
                await response.read()

    async def _ask(self, url: str, body: bytes) -> dict[str, bytes]:
        try:
            async with self._session.post(url + PATH, data=body) as response:
                known = orjson.loads(await response.read()) if response.status == 200 else {}
                return {key: value.encode() for key, value in known.items()}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, AttributeError):
            return {}
