"""Periodic requests for the engines' load, which includes the requests of other gateway replicas."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import aiohttp
import orjson

from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import NO_LOAD, Load, Replica

INTERVAL_SECONDS: Final = 1.0
TIMEOUT_SECONDS: Final = 1.0
MAX_ANSWER_BYTES: Final = 256 * 1024
"""A longer answer is ignored. The load of one data-parallel rank takes about 1 KB."""


async def watch_load(
    pools: Iterable[EnginePool],
    path: str,
    load_of: Callable[[Any], Load | None],
    wanted: Callable[[], bool],
    interval_seconds: float = INTERVAL_SECONDS,
) -> None:
    """While `wanted`, request `path` from every ready replica at every interval, until cancelled.

    The load of a replica whose answer is late, an error or not valid counts as unknown: only the requests of this
    process are then taken into account.
    """
    pools = list(pools)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            if wanted():
                async with asyncio.TaskGroup() as group:
                    for pool in pools:
                        for replica in pool.ready:
                            group.create_task(_update(session, pool, replica, path, load_of))
            await asyncio.sleep(interval_seconds)


async def _update(
    session: aiohttp.ClientSession,
    pool: EnginePool,
    replica: Replica,
    path: str,
    load_of: Callable[[Any], Load | None],
) -> None:
    headers = {"Authorization": f"Bearer {pool.api_key}"} if pool.api_key else {}
    load = None
    try:
        async with session.get(replica.url + path, headers=headers, ssl=pool.trust) as response:
            content = b""
            while len(content) <= MAX_ANSWER_BYTES and (chunk := await response.content.readany()):
                content += chunk
            if response.status == 200 and len(content) <= MAX_ANSWER_BYTES:
                load = load_of(orjson.loads(content))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        pass
    if load is None:
        replica.others = NO_LOAD
    else:
        replica.report(load)
