"""Requests through a gateway whose engines are all stopped, and started again while the requests wait."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dps_testkit.data_plane import CHAT, chat, posted
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

REQUESTS = 8


@pytest.fixture
async def stopped(tmp_path: Path) -> AsyncIterator[tuple[Gateway, Engine]]:
    """A gateway whose engines are stopped, and the greedy one."""
    async with LocalProcesses(tmp_path) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy")
        gateway = await processes.start_gateway([speculative], [greedy], {"timeouts": {"wakeSeconds": 100}})
        await asyncio.gather(speculative.child.stop(), greedy.child.stop())

        async def noticed() -> bool:
            return await gateway.metric("dps_ready_replicas") == 0

        await wait_until(noticed, "no engine is ready")
        yield gateway, greedy


async def request(gateway: Gateway, number: int, *, stream: bool = False) -> int:
    """The status of one request of a session of its own, whose answer is read completely."""
    url = gateway.url + CHAT
    async with posted(url, chat(stream=stream), **{"x-session-id": f"s{number}"}) as response:
        await response.read()
        return response.status


async def waiting(gateway: Gateway, count: int) -> None:
    """Return when this number of requests waits."""

    async def waits() -> bool:
        return await gateway.metric("dps_queued") == count

    await wait_until(waits, f"{count} requests wait")


async def test_requests_wait_until_an_engine_has_started_and_none_fails(
    stopped: tuple[Gateway, Engine],
) -> None:
    gateway, engine = stopped
    requests = [
        asyncio.create_task(request(gateway, number, stream=number % 2 == 0)) for number in range(REQUESTS)
    ]
    await waiting(gateway, REQUESTS)
    assert await gateway.metric("dps_pool_unavailable_total") == REQUESTS
    engine.child.start()
    assert await asyncio.gather(*requests) == [200] * REQUESTS


async def test_suspended_gateway_refuses_requests_that_wait(stopped: tuple[Gateway, Engine]) -> None:
    gateway, _ = stopped
    held = asyncio.create_task(request(gateway, 0))
    await waiting(gateway, 1)
    gateway.configure(lambda configuration: configuration.setdefault("routing", {}).update(suspended=True))
    assert await held == 503
    async with posted(gateway.url + CHAT, chat()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "suspended")
