"""Requests beyond those that an engine runs at the same time wait in the gateway, not in the engine."""

import asyncio
from pathlib import Path

import pytest

from dps_testkit.data_plane import CHAT, SLOW, chat, posted
from dps_testkit.http import metric
from dps_testkit.processes import LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

REQUESTS = 10
RUNNING = 2


async def test_burst_waits_in_the_gateway(tmp_path: Path) -> None:
    flags = [*SLOW, "--max-running-requests", str(RUNNING)]
    async with LocalProcesses(tmp_path) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy", arguments=flags)
        gateway = await processes.start_gateway([speculative], [greedy])

        async def limited() -> bool:
            pools = (await gateway.document("/pools")).values()
            return all(replica["maxInFlight"] == RUNNING for pool in pools for replica in pool["replicas"])

        await wait_until(limited, "the gateway knows the engines' limits")

        async def request(number: int) -> int:
            headers = {"x-session-id": f"s{number}"}
            async with posted(gateway.url + CHAT, chat(100), **headers) as response:
                await response.read()
                return response.status

        requests = [asyncio.create_task(request(number)) for number in range(REQUESTS)]

        async def queued() -> bool:
            waiting, demand = [await gateway.metric(name) for name in ("dps_queued", "dps_demand")]
            return waiting == REQUESTS - 2 * RUNNING and demand == REQUESTS

        async def busy() -> bool:
            return [await engine.running() for engine in (speculative, greedy)] == [RUNNING] * 2

        await wait_until(queued, "the other requests wait in the gateway")
        await wait_until(busy, "each engine runs as many requests as it can")
        for engine in (speculative, greedy):
            assert await metric(engine.url, "sglang:num_queue_reqs") == 0
        assert await asyncio.gather(*requests) == [200] * REQUESTS
