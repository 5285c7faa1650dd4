"""Periodic health checks, which return failed replicas to service."""

import asyncio
import logging
from collections.abc import Callable, Iterable

import aiohttp

from dps_gateway.upstream.exchange import out_of_files
from dps_gateway.upstream.pool import EnginePool
from dps_gateway.upstream.replica import Replica

log = logging.getLogger(__name__)


async def watch_health(pools: Iterable[EnginePool], path: str, interval_seconds: Callable[[], float]) -> None:
    """Request `path` from every replica at every interval, until cancelled."""
    pools = list(pools)
    async with aiohttp.ClientSession() as session:
        while True:
            limits = aiohttp.ClientTimeout(total=max(1.0, interval_seconds()))
            async with asyncio.TaskGroup() as group:
                for pool in pools:
                    for replica in list(pool.replicas.values()):
                        group.create_task(_check(session, pool, replica, path, limits))
            replicas = [replica for pool in pools for replica in pool.replicas.values()]
            all_available = all(replica.available for replica in replicas)
            # An unavailable replica is checked every second, so that it returns to service soon.
            await asyncio.sleep(interval_seconds() if all_available else min(1.0, interval_seconds()))


async def _check(
    session: aiohttp.ClientSession,
    pool: EnginePool,
    replica: Replica,
    path: str,
    limits: aiohttp.ClientTimeout,
) -> None:
    headers = {"Authorization": f"Bearer {pool.api_key}"} if pool.api_key else {}
    try:
        async with session.get(
            replica.url + path, headers=headers, timeout=limits, ssl=pool.trust
        ) as response:
            healthy = response.status < 500
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        if out_of_files(error):  # the check says nothing about the replica
            return
        healthy = False
    if healthy != replica.available:
        log.info(
            "replica %s of the %s pool is %s",
            replica.url,
            pool.name,
            "available" if healthy else "unavailable",
        )
    if healthy:
        pool.mark_available(replica)
    else:
        pool.mark_unavailable(replica)
