"""Requests that arrive while no engine of their pool is ready."""

import asyncio

import pytest

from dps_gateway.pool import Pool
from tests.gateway.dispatch.gateway_with_pools import GatewayWithPools, Start, engines
from tests.gateway.servers import configure, until


async def asleep(start: Start, policy: str = "DeltaPrefill") -> tuple[GatewayWithPools, str]:
    """A gateway whose pools have no replica, and the URL of an engine that could be one."""
    gateway = await start(engines(1), engines(1), "{wakeSeconds: 60, healthIntervalSeconds: 600}", policy)
    (url,) = gateway.runtime.pools[Pool.SPECULATIVE].replicas
    for pool in gateway.runtime.pools.values():
        pool.set_endpoints([])
    assert gateway.runtime.ready
    return gateway, url


def suspend(gateway: GatewayWithPools, suspended: bool) -> None:
    configure(gateway.runtime, "routing", suspended=suspended)


async def queued(gateway: GatewayWithPools) -> None:
    """Return when one request waits."""
    await until(lambda: len(gateway.runtime.admission) == 1, "the request waits")


@pytest.mark.parametrize("policy", ["DeltaPrefill", "AlwaysGreedy", "Adaptive"])
@pytest.mark.parametrize("stopped", [[], ["http://127.0.0.1:1"]], ids=["no replica", "a stopped replica"])
async def test_request_waits_for_an_engine_that_starts(start: Start, policy: str, stopped: list[str]) -> None:
    gateway, url = await asleep(start, policy)
    speculative = gateway.runtime.pools[Pool.SPECULATIVE]
    speculative.set_endpoints(stopped)
    waiting = asyncio.create_task(gateway.post())
    await queued(gateway)
    speculative.set_endpoints([url])
    assert (await waiting).status == 200


async def test_request_that_every_engine_has_rejected_does_not_wait(start: Start) -> None:
    gateway = await start(engines(1, status=503), engines(1, status=503), "{wakeSeconds: 60}")
    assert (await gateway.post()).status == 503
    assert gateway.attempts == 2


async def test_requests_without_a_ready_engine_in_their_pool_are_counted(start: Start) -> None:
    gateway, url = await asleep(start)

    def counted(pool: Pool, number: float) -> bool:
        text = gateway.runtime.metrics.render().decode()
        return f'dps_pool_unavailable_total{{pool="{pool.value}"}} {number}' in text

    # increase() ignores the first value of a series, so the series must exist before the first such request.
    assert [counted(pool, 0.0) for pool in Pool] == [True, True]
    gateway.runtime.pools[Pool.GREEDY].set_endpoints([url])
    assert (await gateway.post()).headers["x-dps-pool"] == "greedy"
    assert counted(Pool.SPECULATIVE, 1.0)


async def test_suspended_router_refuses_waiting_and_new_requests(start: Start) -> None:
    gateway, _ = await asleep(start)
    waiting = asyncio.create_task(gateway.post())
    await queued(gateway)
    suspend(gateway, True)
    for response in (await waiting, await gateway.post()):
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "suspended"
    assert gateway.attempts == 0
    assert gateway.runtime.ready


async def test_gateway_is_not_ready_before_an_engine_has_answered_it(start: Start) -> None:
    gateway = await start(engines(1, status=500), engines(1, status=500))
    assert not gateway.runtime.ready


async def test_gateway_remains_ready_when_its_engines_are_removed(start: Start) -> None:
    gateway = await start(engines(1), engines(1))
    assert (await gateway.post()).status == 200
    for pool in gateway.runtime.pools.values():
        pool.set_endpoints([])
    assert gateway.runtime.ready
    assert (await gateway.post()).status == 503


async def test_gateway_that_started_suspended_remains_ready_while_engines_start(start: Start) -> None:
    gateway = await start(engines(1, status=503), engines(1, status=503))
    suspend(gateway, True)
    suspend(gateway, False)
    assert gateway.runtime.ready
    assert (await gateway.post()).status == 503


async def test_stateless_request_is_served_by_the_pool_that_is_free_first(start: Start) -> None:
    gateway = await start(engines(1, delay=0.5), engines(1, delay=2.0), limits="{maxInFlightPerReplica: 1}")
    occupying = [asyncio.create_task(gateway.post(number)) for number in range(2)]
    await until(lambda: gateway.attempts == 2, "both engines are busy")
    response = await gateway.post(path="/v1/embeddings")
    assert (response.status, response.headers["x-dps-pool"]) == (200, "speculative")
    await asyncio.gather(*occupying)
