"""Periodic health checks, which return failed replicas to service, and find engines that generate nothing."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

import aiohttp

from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.exchange import out_of_files
from dps_gateway.upstream.replica import Replica

log = logging.getLogger(__name__)

GENERATION_SECONDS: Final = 25.0
"""Time limit of a check whether an engine generates tokens. SGLang answers after 1 to 20 seconds."""


async def watch_health(pools: Iterable[EnginePool], path: str, interval_seconds: Callable[[], float]) -> None:
    """Request `path` from every replica at every interval, until cancelled.

    Replicas that have been removed are checked until they have no requests, which are given up if they do not answer.
    """
    pools = list(pools)
    # Without a limit, because engines that do not answer would take the connections of the others.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while True:
            limits = aiohttp.ClientTimeout(total=max(1.0, interval_seconds()))
            async with asyncio.TaskGroup() as group:
                for pool in pools:
                    for replica in pool.all_replicas:
                        group.create_task(_check(session, pool, replica, path, limits))
            replicas = [replica for pool in pools for replica in pool.replicas.values()]
            settled = all(replica.available and not replica.late_checks for replica in replicas)
            # Otherwise every second, so that a replica soon returns to service or, after late checks, is unavailable.
            await asyncio.sleep(interval_seconds() if settled else min(1.0, interval_seconds()))


async def _check(
    session: aiohttp.ClientSession,
    pool: EnginePool,
    replica: Replica,
    path: str,
    limits: aiohttp.ClientTimeout,
) -> None:
    before = replica.available
    try:
        status = await _status(session, pool, replica, path, limits)
    except TimeoutError:
        pool.record_late_check(replica)
    except (aiohttp.ClientError, OSError) as error:
        if out_of_files(error):  # the check says nothing about the replica
            return
        pool.mark_unavailable(replica)
    else:
        if status < 500:
            pool.mark_available(replica)
        else:
            pool.mark_unavailable(replica)
    if replica.available != before:
        state = "available" if replica.available else "unavailable"
        log.info("replica %s of the %s pool is %s", replica.url, pool.name, state)


async def watch_generation(
    pools: Iterable[EnginePool],
    path: str,
    interval_seconds: Callable[[], float],
    silent_seconds: Callable[[], float],
    limit_seconds: float = GENERATION_SECONDS,
) -> None:
    """Request `path` from every available replica that has generated nothing for `silent_seconds`, until cancelled.

    An engine can answer other requests although its scheduler hangs. Engines that generate are not checked, because a
    check can cost them the generation of a token.
    """
    pools = list(pools)
    limits = aiohttp.ClientTimeout(total=limit_seconds)
    # Without a limit, because engines that do not answer would take the connections of the others.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while True:
            async with asyncio.TaskGroup() as group:
                for pool in pools:
                    for replica in pool.all_replicas:
                        silent = replica.hung or replica.silent_seconds >= silent_seconds()
                        if replica.available and silent:
                            group.create_task(_check_generation(session, pool, replica, path, limits))
            await asyncio.sleep(interval_seconds())


async def _check_generation(
    session: aiohttp.ClientSession,
    pool: EnginePool,
    replica: Replica,
    path: str,
    limits: aiohttp.ClientTimeout,
) -> None:
    asked = time.monotonic()
    try:
        generates = await _status(session, pool, replica, path, limits) < 500
    except TimeoutError:
        generates = False
    except (aiohttp.ClientError, OSError):  # the health check will find a replica that cannot be reached
        return
    if generates:
        if replica.hung:
            log.info("replica %s of the %s pool generates tokens again", replica.url, pool.name)
        pool.record_token(replica)
    elif not replica.hung and replica.silent_seconds > time.monotonic() - asked:
        log.warning("replica %s of the %s pool generates no tokens", replica.url, pool.name)
        pool.mark_hung(replica)


async def _status(
    session: aiohttp.ClientSession,
    pool: EnginePool,
    replica: Replica,
    path: str,
    limits: aiohttp.ClientTimeout,
) -> int:
    async with session.get(
        replica.url + path, headers=pool.authorization, timeout=limits, ssl=pool.trust
    ) as response:
        return response.status
