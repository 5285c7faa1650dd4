"""Exchange cached session state with the other gateway replicas and worker processes while Redis is unavailable."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

import aiohttp
import orjson

from dps_gateway.session.store import Peers

PATH: Final = "/mirror"
"""Path on the admin port. POST takes a JSON array of keys and returns an object of cached values; PUT takes such an
object and caches its values."""
TIMEOUT_SECONDS: Final = 0.25
"""The maximum time for which a request waits for a dead peer whose endpoint has not been removed yet."""

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_TIMEOUT: Final = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
_UNIX_URL: Final = "http://worker"
"""The base URL of requests on a Unix socket; the host is ignored."""


class HttpPeers:
    """Queries the admin ports of all gateway replicas in parallel.

    The list may include this gateway replica, whose answer is redundant.
    """

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._headers: dict[str, str] = {}
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)

    def set_token(self, token: str | None) -> None:
        """Set the token of the peers' admin ports, None if they require none."""
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}

    def set_endpoints(self, urls: Iterable[str]) -> None:
        """Set the peers' admin base URLs, as found by discovery."""
        self._urls = tuple(urls)

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        """Each peer's cached values of `keys`. Peers that time out contribute nothing. Never raises."""
        return await asyncio.gather(*(_fetch(self._session, url, keys, self._headers) for url in self._urls))

    async def publish(self, entries: dict[str, bytes]) -> None:
        """Push entries to every peer's mirror. Peers that time out are skipped. Never raises."""
        await asyncio.gather(*(_push(self._session, url, entries, self._headers) for url in self._urls))

    async def close(self) -> None:
        await self._session.close()


class WorkerPeers:
    """Queries the other worker processes of this gateway replica, each on its own Unix socket in a shared folder."""

    def __init__(self, own_socket: Path) -> None:
        self._own = own_socket
        self._sessions: dict[Path, aiohttp.ClientSession] = {}

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        """Each worker's cached values of `keys`. Never raises."""
        return await asyncio.gather(*(_fetch(session, _UNIX_URL, keys) for session in await self._others()))

    async def publish(self, entries: dict[str, bytes]) -> None:
        """Push entries to every worker's mirror. Never raises."""
        await asyncio.gather(*(_push(session, _UNIX_URL, entries) for session in await self._others()))

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def _others(self) -> list[aiohttp.ClientSession]:
        """A session for the socket of every other worker; workers are replaced when they die."""
        sockets = set(self._own.parent.glob("*.sock")) - {self._own}
        for gone in self._sessions.keys() - sockets:
            await self._sessions.pop(gone).close()
        for new in sockets - self._sessions.keys():
            connector = aiohttp.UnixConnector(str(new))
            self._sessions[new] = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)
        return list(self._sessions.values())


class AllPeers:
    """Several groups of peers as one."""

    def __init__(self, groups: Sequence[Peers]) -> None:
        self._groups = groups

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        found = await asyncio.gather(*(group.values(keys) for group in self._groups))
        return [values for group in found for values in group]

    async def publish(self, entries: dict[str, bytes]) -> None:
        await asyncio.gather(*(group.publish(entries) for group in self._groups))


async def _push(
    session: aiohttp.ClientSession,
    url: str,
    entries: dict[str, bytes],
    headers: Mapping[str, str] = NO_HEADERS,
) -> None:
    body = orjson.dumps({key: value.decode() for key, value in entries.items()})
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.put(url + PATH, data=body, headers=headers) as response:
            await response.read()


async def _fetch(
    session: aiohttp.ClientSession, url: str, keys: list[str], headers: Mapping[str, str] = NO_HEADERS
) -> dict[str, bytes]:
    try:
        async with session.post(url + PATH, data=orjson.dumps(keys), headers=headers) as response:
            values = orjson.loads(await response.read()) if response.status == 200 else {}
            return {key: value.encode() for key, value in values.items()}
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, AttributeError):
        return {}
