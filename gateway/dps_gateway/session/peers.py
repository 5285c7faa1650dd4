"""Exchange cached session state with the other gateway replicas and worker processes while Redis is unavailable.

What peers return is checked: a peer of another version, or an impostor, must not make requests fail or exhaust the
memory.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp
import orjson

from dps_gateway.session.keys import MAX_VALUE_BYTES, is_valid_value
from dps_gateway.session.peer_signature import SIGNATURE, SignedRequest
from dps_gateway.session.storage import Peers

log = logging.getLogger(__name__)

PATH: Final = "/mirror"
"""Path on the admin port. POST takes a JSON array of keys and returns an object of cached values; PUT takes such an
object and caches its values; DELETE takes an array of keys and removes their values."""
TIMEOUT_SECONDS: Final = 0.25
"""The maximum time for which a request waits for a dead peer whose endpoint has not been removed yet."""

PEER_CONNECTIONS: Final = 16
"""Maximum number of connections to one peer, whose admin port accepts a limited number from all of its peers."""

MAX_ESCAPED: Final = 2
"""The maximum length of a value as a string in JSON, as a multiple of its length: only quotation marks and backslashes
are escaped in a valid value."""

_TIMEOUT: Final = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
_UNIX_URL: Final = "http://worker"
"""The base URL of requests on a Unix socket; the host is ignored."""


class HttpPeers:
    """Queries the admin ports of all gateway replicas in parallel.

    The list may include this gateway replica, whose answer is redundant. `on_invalid` is called with the number of
    entries that are ignored because they are not valid.
    """

    def __init__(self, on_invalid: Callable[[int], None] = lambda count: None) -> None:
        self._invalid = _Invalid(on_invalid)
        self._urls: tuple[str, ...] = ()
        self._token: str | None = None
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=PEER_CONNECTIONS)
        self._session = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)

    def set_token(self, token: str | None) -> None:
        """Set the token of the peers' admin ports, with which requests and answers are signed; None if they are not."""
        self._token = token

    def set_endpoints(self, urls: Iterable[str]) -> None:
        """Set the peers' admin base URLs, as found by discovery."""
        self._urls = tuple(urls)
        self._invalid.keep(self._urls)

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        """Each peer's cached values of `keys`. Peers that time out contribute nothing. Never raises."""
        fetches = (_fetch(self._session, url, keys, self._invalid, self._token) for url in self._urls)
        return await asyncio.gather(*fetches)

    async def publish(self, entries: dict[str, bytes]) -> None:
        """Push entries to every peer's mirror. Peers that time out are skipped. Never raises."""
        await self._send("PUT", _entries(entries))

    async def forget(self, keys: Sequence[str]) -> None:
        """Remove the values of `keys` from every peer's mirror. Peers that time out are skipped. Never raises."""
        await self._send("DELETE", orjson.dumps(keys))

    async def _send(self, method: str, body: bytes) -> None:
        await asyncio.gather(*(_send(self._session, url, method, body, self._token) for url in self._urls))

    async def close(self) -> None:
        await self._session.close()


class WorkerPeers:
    """Queries the other worker processes of this gateway replica, each on its own Unix socket in a shared folder.

    `on_invalid` is described at `HttpPeers`.
    """

    def __init__(self, own_socket: Path, on_invalid: Callable[[int], None] = lambda count: None) -> None:
        self._own = own_socket
        self._invalid = _Invalid(on_invalid)
        self._sessions: dict[Path, aiohttp.ClientSession] = {}

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        """Each worker's cached values of `keys`. Never raises."""
        others = await self._others()
        return await asyncio.gather(*(_fetch(session, _UNIX_URL, keys, self._invalid) for session in others))

    async def publish(self, entries: dict[str, bytes]) -> None:
        """Push entries to every worker's mirror. Never raises."""
        await self._send("PUT", _entries(entries))

    async def forget(self, keys: Sequence[str]) -> None:
        """Remove the values of `keys` from every worker's mirror. Never raises."""
        await self._send("DELETE", orjson.dumps(keys))

    async def _send(self, method: str, body: bytes) -> None:
        others = await self._others()
        await asyncio.gather(*(_send(session, _UNIX_URL, method, body) for session in others))

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def _others(self) -> list[aiohttp.ClientSession]:
        """A session for the socket of every other worker; workers are replaced when they die."""
        sockets = set(self._own.parent.glob("*.sock")) - {self._own}
        for gone in self._sessions.keys() - sockets:
            # A concurrent call may have removed it while this one waited.
            if (session := self._sessions.pop(gone, None)) is not None:
                await session.close()
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

    async def forget(self, keys: Sequence[str]) -> None:
        await asyncio.gather(*(group.forget(keys) for group in self._groups))


def _entries(entries: Mapping[str, bytes]) -> bytes:
    return orjson.dumps({key: value.decode() for key, value in entries.items()})


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    method: str,
    body: bytes,
    token: str | None = None,
) -> None:
    if session.closed:
        return
    _, headers = _signed(token, method, body)
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.request(method, url + PATH, data=body, headers=headers) as response:
            await response.read()


async def _fetch(
    session: aiohttp.ClientSession,
    url: str,
    keys: list[str],
    report: "_Invalid",
    token: str | None = None,
) -> dict[str, bytes]:
    """The peer's valid values of `keys`. With a token, the peer must have signed them.

    A concurrent call may have closed the session, because the peer has ended.
    """
    if session.closed:
        return {}
    asked = orjson.dumps(keys)
    signed, headers = _signed(token, "POST", asked)
    limit = sum(len(key) + MAX_ESCAPED * MAX_VALUE_BYTES for key in keys)
    content = b""
    try:
        async with session.post(url + PATH, data=asked, headers=headers) as response:
            if response.status != 200:
                return {}
            signature = response.headers.get(SIGNATURE, "")
            while len(content) <= limit and (chunk := await response.content.readany()):
                content += chunk
    except (aiohttp.ClientError, OSError, TimeoutError):
        return {}
    authentic = signed is None or signed.is_answered_by(signature, content)
    values, invalid = _valid(content if authentic and len(content) <= limit else b"", keys)
    if invalid:
        report.add(url, invalid)
    return values


def _signed(token: str | None, method: str, body: bytes) -> tuple[SignedRequest | None, dict[str, str]]:
    """The request as signed with the token, and its headers. Without a token, it is not signed."""
    if token is None:
        return None, {}
    signed = SignedRequest.of(token, method, PATH, body)
    return signed, {"Authorization": signed.authorization}


class _Invalid:
    """Counts invalid entries, and logs the first for each base URL, which all workers share."""

    def __init__(self, on_invalid: Callable[[int], None]) -> None:
        self._on_invalid = on_invalid
        self._logged: set[str] = set()

    def add(self, url: str, count: int) -> None:
        """Record that the peer at this base URL has returned such entries."""
        self._on_invalid(count)
        if url not in self._logged:
            self._logged.add(url)
            log.warning("the peer %s returns session state that is not valid; it is ignored", url)

    def keep(self, urls: Iterable[str]) -> None:
        """Forget all peers but these."""
        self._logged.intersection_update(urls)


def _valid(content: bytes, keys: Iterable[str]) -> tuple[dict[str, bytes], int]:
    """The valid values of `keys` in a peer's answer, and the number of other entries.

    An unreadable answer counts as one such entry.
    """
    try:
        document = orjson.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        return {}, 1
    asked = set(keys)
    values = {
        key: encoded
        for key, value in document.items()
        if key in asked and isinstance(value, str) and is_valid_value(key, encoded := value.encode())
    }
    return values, len(document) - len(values)
