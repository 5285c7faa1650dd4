"""Requests that make engines close their connection, and the requests of other clients meanwhile."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from dps_gateway.engine.sglang import SGLang
from dps_gateway.pool import Pool
from dps_gateway.upstream.health import watch_health
from dps_gateway.upstream.replica import ERRORS_TO_EJECT, Configuration
from dps_testkit.in_process_gateway import send_stream
from tests.gateway.dispatch.gateway_with_pools import FixedStatusEngine, GatewayWithPools, Start
from tests.gateway.servers import until

POISON = "poison"


class PoisonableEngine(FixedStatusEngine):
    """Closes the connection of every request that contains POISON. If `late`, its answer has begun before."""

    def __init__(self, late: bool = False, times: float = math.inf) -> None:
        """times: the number of requests whose connection it closes, after which it answers them."""
        super().__init__()
        self.late = late
        self.times = times
        self.poisoned = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if POISON not in await request.text() or self.poisoned >= self.times:
            return await super().handle(request)
        self.poisoned += 1
        if self.late:
            content = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
            return await send_stream(request, [content], abort=True)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


@asynccontextmanager
async def health_checks(gateway: GatewayWithPools) -> AsyncIterator[None]:
    """Check the engines' health every ten minutes, apart from checks that have a reason."""
    path, pools = SGLang.health_path, gateway.runtime.pools.values()
    task = asyncio.create_task(watch_health(pools, path, lambda: 600.0))
    await asyncio.sleep(0)
    yield
    task.cancel()


async def poison(gateway: GatewayWithPools, **fields: Any) -> tuple[int, str]:
    """The status and the body of the answer to a poisoned request."""
    response = await gateway.post(user=POISON, **fields)
    return response.status, await response.text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [False, True])
async def test_other_clients_are_served_after_a_poisoned_request(
    start: Start, late: bool, stream: bool
) -> None:
    gateway = await start([PoisonableEngine(late)], [PoisonableEngine(late)])
    async with health_checks(gateway):
        for number in range(3):
            await poison(gateway, seed=number, stream=stream)
            assert (await gateway.post(number)).status == 200


async def test_request_waits_for_the_check_of_the_last_replicas(start: Start) -> None:
    gateway = await start([PoisonableEngine()], [PoisonableEngine()])
    await poison(gateway)
    waiting = [asyncio.create_task(gateway.post(number)) for number in range(3)]
    await until(lambda: len(gateway.runtime.admission) == len(waiting), "the requests wait")
    async with health_checks(gateway):
        assert {(await each).status for each in waiting} == {200}


@pytest.mark.parametrize("policy", ["DeltaPrefill", "AlwaysSpeculative", "Adaptive"])
async def test_request_is_refused_when_the_check_of_the_last_replicas_fails(
    start: Start, policy: str
) -> None:
    gateway = await start([PoisonableEngine()], [PoisonableEngine()], policy=policy)
    await poison(gateway)
    for pool in gateway.runtime.pools.values():
        pool.set_endpoints([*pool.replicas, "http://127.0.0.1:9"])
        (_, dead) = pool.replicas.values()
        pool.mark_unavailable(dead)
    waiting = asyncio.create_task(gateway.post())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    for pool in gateway.runtime.pools.values():
        pool.mark_unavailable(next(iter(pool.replicas.values())))
    assert (await asyncio.wait_for(waiting, 5)).status == 503


async def test_engine_that_breaks_off_a_stream_is_checked_at_once(start: Start) -> None:
    """Otherwise, an engine that has crashed would receive requests until the next regular check."""
    gateway = await start([PoisonableEngine(late=True)], [FixedStatusEngine()])
    (replica,) = gateway.runtime.pools[Pool.SPECULATIVE].replicas.values()
    for number in range(ERRORS_TO_EJECT + 1):  # these are not errors of the engine
        assert "upstream_broken" in (await poison(gateway, stream=True, n=2, seed=number))[1]
        assert (replica.suspected, replica.ready) == (True, False)
        async with health_checks(gateway):
            await until(lambda: replica.ready, "the check succeeds")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
async def test_request_that_two_engines_failed_on_is_not_sent_to_a_third(
    start: Start, path: str, stream: bool
) -> None:
    engines = [PoisonableEngine() for _ in range(6)]
    gateway = await start(engines[:3], engines[3:])
    async with health_checks(gateway):
        for _ in range(5):
            status, text = await poison(gateway, path=path, stream=stream, max_tokens=4)
            assert (status, "two engines" in text) == (502, True)
        assert sum(engine.poisoned > 0 for engine in engines) == 2
        assert (await gateway.post(path=path, max_tokens=4)).status == 200


async def test_stream_that_two_engines_broke_off_is_not_sent_to_a_third(start: Start) -> None:
    engines = [PoisonableEngine(late=True) for _ in range(6)]
    gateway = await start(engines[:3], engines[3:])
    async with health_checks(gateway):
        assert "upstream_broken" in (await poison(gateway, stream=True))[1]
        status, text = await poison(gateway, stream=True)
        assert (status, "two engines" in text) == (502, True)
        assert sum(engine.poisoned > 0 for engine in engines) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_an_engine_has_answered_does_not_count_as_poisoned(
    start: Start, stream: bool
) -> None:
    """Many clients may send the same request, each of which happens to be on an engine that crashes."""
    speculative, greedy = PoisonableEngine(times=1), PoisonableEngine(times=0)
    gateway = await start([speculative], [greedy], policy="AlwaysSpeculative")
    async with health_checks(gateway):
        assert (await poison(gateway, stream=stream))[0] == 200
        for replica in gateway.runtime.pools[Pool.SPECULATIVE].replicas.values():
            gateway.runtime.pools[Pool.SPECULATIVE].mark_unavailable(replica)
        greedy.times = greedy.poisoned + 1
        assert (await poison(gateway, stream=stream))[0] == 200
    assert greedy.poisoned == 1


async def test_checked_replica_keeps_its_configuration(start: Start) -> None:
    """Otherwise, it would refuse requests that need a cache salt until the configuration is known again."""
    gateway = await start([PoisonableEngine()], [PoisonableEngine()])
    pool = gateway.runtime.pools[Pool.SPECULATIVE]
    (replica,) = pool.replicas.values()
    pool.record_configuration(replica, configuration := Configuration(max_running=7))
    async with health_checks(gateway):
        await poison(gateway)
        assert (await gateway.post()).status == 200
        assert replica.configuration is configuration


async def test_replica_that_closes_every_connection_is_ejected_although_its_checks_succeed(
    start: Start,
) -> None:
    failing = PoisonableEngine()
    gateway = await start([failing], [FixedStatusEngine()])
    async with health_checks(gateway):
        for number in range(2 * ERRORS_TO_EJECT):
            assert (await poison(gateway, seed=number))[0] == 200
    assert failing.poisoned == 2 * ERRORS_TO_EJECT
