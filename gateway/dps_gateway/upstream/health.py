"""The gateway's own periodic requests to the engines.

Health checks return failed replicas to service. Checks of the generation find engines that generate nothing, because
an engine can answer other requests although its scheduler hangs. Engines also report their load and configuration.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final

import aiohttp
import orjson

from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.exchange import out_of_files
from dps_gateway.upstream.replica import NO_LOAD, UNKNOWN, Configuration, Load, Replica

log = logging.getLogger(__name__)

GENERATION_SECONDS: Final = 25.0
"""Time limit of a check whether an engine generates tokens. SGLang answers after 1 to 20 seconds."""

PROBE_SECONDS: Final = 2.0
"""Time limit of a health check after a failed connection. Requests without another replica wait for it."""

LOAD_INTERVAL_SECONDS: Final = 1.0
LOAD_TIMEOUT_SECONDS: Final = 1.0

CONFIGURATION_INTERVAL_SECONDS: Final = 1.0
CONFIGURATION_TIMEOUT_SECONDS: Final = 10.0
"""The limit is long, because SGLang answers a request for its configuration only between two forward passes."""

MAX_ANSWER_BYTES: Final = 1024 * 1024
"""A longer answer is ignored. The load of one data-parallel rank takes about 1 KB, and SGLang's configuration 20 KB for
each of them."""

Get = Callable[[EnginePool, Replica], Awaitable[tuple[int, bytes]]]
"""Requests a path from a replica. Returns the status, and the body if it is not too long."""


async def watch_health(pools: Iterable[EnginePool], path: str, interval_seconds: Callable[[], float]) -> None:
    """Request `path` from every replica at every interval, and at once after a failed connection, until cancelled.

    Replicas that have been removed are checked until they have no requests, which are given up if they do not answer.
    """
    pools = list(pools)

    def pause() -> float:
        replicas = [replica for pool in pools for replica in pool.replicas.values()]
        settled = all(replica.available and not replica.late_checks for replica in replicas)
        # Otherwise every second, so that a replica soon returns to service or, after late checks, is unavailable.
        return interval_seconds() if settled else min(1.0, interval_seconds())

    def limit_seconds() -> float:
        return max(1.0, interval_seconds())

    def suspected(pool: EnginePool) -> list[Replica]:
        return [replica for replica in pool.replicas.values() if replica.suspected]

    async with asyncio.TaskGroup() as tasks:
        for pool in pools:
            probes = _watch(
                [pool], path, suspected, _probe, lambda: PROBE_SECONDS, interval_seconds, pool.suspicion
            )
            tasks.create_task(probes)
        await _watch(pools, path, lambda pool: pool.all_replicas, _check, limit_seconds, pause)


async def watch_generation(
    pools: Iterable[EnginePool],
    path: str,
    interval_seconds: Callable[[], float],
    silent_seconds: Callable[[], float],
    limit_seconds: float = GENERATION_SECONDS,
) -> None:
    """Request `path` from every available replica that has generated nothing for `silent_seconds`, until cancelled.

    Engines that generate are not checked, because a check can cost them the generation of a token.
    """

    def silent(pool: EnginePool) -> list[Replica]:
        return [
            replica
            for replica in pool.all_replicas
            if replica.available and (replica.hung or replica.silent_seconds >= silent_seconds())
        ]

    await _watch(pools, path, silent, _check_generation, lambda: limit_seconds, interval_seconds)


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

    async def update(get: Get, pool: EnginePool, replica: Replica) -> None:
        status, document = await _document(get, pool, replica)
        load = load_of(document) if status == 200 else None
        if load is None:
            replica.other_load = NO_LOAD
        else:
            replica.report(load)

    def replicas(pool: EnginePool) -> list[Replica]:
        return pool.ready if wanted() else []

    await _watch(pools, path, replicas, update, lambda: LOAD_TIMEOUT_SECONDS, lambda: interval_seconds)


async def watch_configuration(
    pools: Iterable[EnginePool],
    path: str,
    configuration_of: Callable[[Any], Configuration | None],
    interval_seconds: float = CONFIGURATION_INTERVAL_SECONDS,
) -> None:
    """Request `path` from every ready replica whose configuration is unknown, until cancelled.

    If an engine does not answer, or answers with a server error, the request is repeated.
    """

    async def update(get: Get, pool: EnginePool, replica: Replica) -> None:
        status, document = await _document(get, pool, replica)
        if status is not None and status < 500 and replica.available:
            found = configuration_of(document) if status == 200 else None
            pool.record_configuration(replica, found or UNKNOWN)

    def unknown(pool: EnginePool) -> list[Replica]:
        return [replica for replica in pool.ready if replica.configuration is None]

    limit_seconds = CONFIGURATION_TIMEOUT_SECONDS
    await _watch(pools, path, unknown, update, lambda: limit_seconds, lambda: interval_seconds)


async def _watch(
    pools: Iterable[EnginePool],
    path: str,
    replicas: Callable[[EnginePool], list[Replica]],
    check: Callable[[Get, EnginePool, Replica], Coroutine[Any, Any, None]],
    limit_seconds: Callable[[], float],
    pause_seconds: Callable[[], float],
    wake: asyncio.Event | None = None,
) -> None:
    """Check `replicas` of each pool with an answer to a request of `path`, again and again until cancelled.

    `wake` ends a pause early.
    """
    pools, wake = list(pools), wake or asyncio.Event()
    # Without a limit, because engines that do not answer would take the connections of the others.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def get(pool: EnginePool, replica: Replica) -> tuple[int, bytes]:
            limits = aiohttp.ClientTimeout(total=limit_seconds())
            async with session.get(
                replica.url + path, headers=pool.authorization, timeout=limits, ssl=pool.trust
            ) as response:
                content = b""
                while len(content) <= MAX_ANSWER_BYTES and (chunk := await response.content.readany()):
                    content += chunk
                return response.status, content

        while True:
            async with asyncio.TaskGroup() as group:
                for pool in pools:
                    for replica in replicas(pool):
                        group.create_task(check(get, pool, replica))
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), pause_seconds())
            wake.clear()


async def _probe(get: Get, pool: EnginePool, replica: Replica) -> None:
    await _check(get, pool, replica)
    if replica.suspected:  # it has not answered in time
        pool.mark_unavailable(replica)


async def _check(get: Get, pool: EnginePool, replica: Replica) -> None:
    before = replica.available
    try:
        status, _ = await get(pool, replica)
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


async def _check_generation(get: Get, pool: EnginePool, replica: Replica) -> None:
    asked = time.monotonic()
    try:
        generates = (await get(pool, replica))[0] < 500
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


async def _document(get: Get, pool: EnginePool, replica: Replica) -> tuple[int | None, Any]:
    """The status, and the document if the answer is JSON; neither if the engine does not answer."""
    try:
        status, content = await get(pool, replica)
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None, None
    try:
        return status, orjson.loads(content) if len(content) <= MAX_ANSWER_BYTES else None
    except orjson.JSONDecodeError:
        return status, None
