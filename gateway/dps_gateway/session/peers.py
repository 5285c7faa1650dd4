"""Exchange cached session state with the other gateway replicas while Redis is unavailable."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import aiohttp
import orjson

PATH: Final = "/mirror"
"""Path on the admin port. POST takes a JSON array of keys and returns an object of cached values; PUT takes such an
object and caches its values."""
TIMEOUT_SECONDS: Final = 0.25
"""The maximum time for which a request waits for a dead peer whose endpoint has not been removed yet."""


class HttpPeers:
    """Queries the admin ports of all gateway replicas in parallel.

    The list may include this gateway replica, whose answer is redundant.
    """

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))

    def set_endpoints(self, urls: Iterable[str]) -> None:
        """Set the peers' admin base URLs, as found by discovery."""
        self._urls = tuple(urls)

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        """Each peer's cached values of `keys`. Peers that time out contribute nothing. Never raises."""
        return await asyncio.gather(*(self._fetch(url, orjson.dumps(keys)) for url in self._urls))

    async def publish(self, entries: dict[str, bytes]) -> None:
        """Push entries to every peer's mirror. Peers that time out are skipped. Never raises."""
        body = orjson.dumps({key: value.decode() for key, value in entries.items()})
        await asyncio.gather(*(self._push(url, body) for url in self._urls))

    async def close(self) -> None:
        await self._session.close()

    async def _push(self, url: str, body: bytes) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._session.put(url + PATH, data=body) as response:
                await response.read()

    async def _fetch(self, url: str, body: bytes) -> dict[str, bytes]:
        try:
            async with self._session.post(url + PATH, data=body) as response:
                values = orjson.loads(await response.read()) if response.status == 200 else {}
                return {key: value.encode() for key, value in values.items()}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, AttributeError):
            return {}
