"""Periodic requests for the engines' load, and one request to each engine for its configuration."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import aiohttp
import orjson

from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import NO_LOAD, UNKNOWN, Configuration, Load, Replica

LOAD_INTERVAL_SECONDS: Final = 1.0
LOAD_TIMEOUT_SECONDS: Final = 1.0

CONFIGURATION_INTERVAL_SECONDS: Final = 1.0
CONFIGURATION_TIMEOUT_SECONDS: Final = 10.0
"""The limit is long, because SGLang answers a request for its configuration only between two forward passes."""

MAX_ANSWER_BYTES: Final = 1024 * 1024
"""A longer answer is ignored. The load of one data-parallel rank takes about 1 KB, and SGLang's configuration 20 KB for
each of them."""


async def watch_load(
    pools: Iterable[EnginePool],
    path: str,
    load_of: Callable[[Any], Load | None],
    wanted: Callable[[], bool],
    interval_seconds: float = LOAD_INTERVAL_SECONDS,
) -> None:
    """While `wanted`, request `path` from every ready replica at every interval, until cancelled.

    The load of a replica whose answer is late, an error or not valid counts as unknown: only the requests of this
    process are then taken into account.
    """

    async def update(session: aiohttp.ClientSession, pool: EnginePool, replica: Replica) -> None:
        status, document = await _answer(session, pool, replica, path)
        load = load_of(document) if status == 200 else None
        if load is None:
            replica.others = NO_LOAD
        else:
            replica.report(load)

    await _watch(pools, update, wanted, LOAD_TIMEOUT_SECONDS, interval_seconds)


async def watch_configuration(
    pools: Iterable[EnginePool],
    path: str,
    configuration_of: Callable[[Any], Configuration | None],
    interval_seconds: float = CONFIGURATION_INTERVAL_SECONDS,
) -> None:
    """Request `path` from every ready replica whose configuration is unknown, until cancelled.

    If an engine does not answer, or answers with a server error, the request is repeated.
    """

    async def update(session: aiohttp.ClientSession, pool: EnginePool, replica: Replica) -> None:
        if replica.configuration is not None:
            return
        status, document = await _answer(session, pool, replica, path)
        if status is not None and status < 500 and replica.available:
            found = configuration_of(document) if status == 200 else None
            pool.record_configuration(replica, found or UNKNOWN)

    await _watch(pools, update, lambda: True, CONFIGURATION_TIMEOUT_SECONDS, interval_seconds)


Update = Callable[[aiohttp.ClientSession, EnginePool, Replica], Awaitable[None]]


async def _watch(
    pools: Iterable[EnginePool],
    update: Update,
    wanted: Callable[[], bool],
    timeout_seconds: float,
    interval_seconds: float,
) -> None:
    pools = list(pools)
    connector = aiohttp.TCPConnector(limit=0)  # as for health checks
    limits = aiohttp.ClientTimeout(total=timeout_seconds)
    async with aiohttp.ClientSession(connector=connector, timeout=limits) as session:
        while True:
            if wanted():
                await asyncio.gather(
                    *(update(session, pool, replica) for pool in pools for replica in pool.ready)
                )
            await asyncio.sleep(interval_seconds)


async def _answer(
    session: aiohttp.ClientSession, pool: EnginePool, replica: Replica, path: str
) -> tuple[int | None, Any]:
    """The status, and the document if the answer is JSON; neither if the engine does not answer."""
    status = None
    try:
        async with session.get(replica.url + path, headers=pool.authorization, ssl=pool.trust) as response:
            content = b""
            while len(content) <= MAX_ANSWER_BYTES and (chunk := await response.content.readany()):
                content += chunk
            status = response.status
            return status, orjson.loads(content) if len(content) <= MAX_ANSWER_BYTES else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return status, None
