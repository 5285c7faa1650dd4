"""Limits that the workers of a gateway share, whichever of them serves a connection."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from dps_testkit.data_plane import CHAT, ENDLESS_STREAM, SLOW
from dps_testkit.processes import LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="finding the workers requires /proc"),
]

LIMIT = 3
HEADERS = {"Authorization": "Bearer sk-limited", "Connection": "close"}


async def test_workers_share_the_limit_of_a_key_and_forget_the_requests_of_dead_workers(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"team:sk-limited maxInFlight={LIMIT}\n")
    async with LocalProcesses(tmp_path) as processes, aiohttp.ClientSession(headers=HEADERS) as http:
        (engine,) = await processes.start_engines("only", arguments=SLOW)
        gateway = await processes.start_gateway(
            [engine], [engine], {"listen": {"workers": 2}, "auth": {"keysFile": str(keys)}}
        )
        await gateway.wait_for_workers(2)

        async def begin() -> aiohttp.ClientResponse:
            return await http.post(gateway.url + CHAT, json=ENDLESS_STREAM)

        running: list[aiohttp.ClientResponse] = []

        async def reached() -> bool:
            response = await begin()
            if response.status == 200:
                running.append(response)
            else:
                response.close()
            return len(running) == LIMIT

        for _ in range(6):  # the kernel chooses the worker of each connection
            await wait_until(reached, "the key has as many requests in flight as it may have")
            refused = [await begin() for _ in range(LIMIT)]
            assert [response.status for response in refused] == [429] * LIMIT
            running += refused
            while running:
                running.pop().close()
        await wait_until(reached, "the key has as many requests in flight as it may have")
        for pid in gateway.workers:
            os.kill(pid, signal.SIGKILL)
        await gateway.wait_for_workers(4)  # both have been replaced
        while running:
            running.pop().close()
        await wait_until(reached, "the requests of the dead workers no longer count")
        while running:
            running.pop().close()


async def test_workers_share_the_slots_of_an_engine_and_pass_them_on(tmp_path: Path) -> None:
    headers = {"Connection": "close"}
    async with LocalProcesses(tmp_path) as processes, aiohttp.ClientSession(headers=headers) as http:
        (engine,) = await processes.start_engines("only", arguments=SLOW)
        limits = {"maxInFlightPerReplica": LIMIT, "maxQueued": LIMIT}
        gateway = await processes.start_gateway(
            [engine], [engine], {"listen": {"workers": 2}, "limits": limits}
        )
        await gateway.wait_for_workers(2)

        async def begin() -> aiohttp.ClientResponse:
            return await http.post(gateway.url + CHAT, json=ENDLESS_STREAM)

        # Both pools have the same engine, and each has its own slots.
        running = [await begin() for _ in range(2 * LIMIT)]
        assert [response.status for response in running] == [200] * (2 * LIMIT)
        waiting = [asyncio.create_task(begin()) for _ in range(LIMIT)]

        async def queued() -> bool:
            return await gateway.metric("dps_queued") == LIMIT

        await wait_until(queued, "the queue is full")
        refused = [await begin() for _ in range(4)]
        assert [response.status for response in refused] == [429] * 4
        for response in running:
            response.close()
        for response in await asyncio.gather(*waiting):
            assert response.status == 200
            response.close()
