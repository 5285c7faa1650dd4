"""A gateway with few file descriptors, and clients that open many connections without sending a request."""

import asyncio
import os
import resource
import signal
from pathlib import Path

import aiohttp
import pytest

from dps_testkit.data_plane import CHAT, chat
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

FILES = 130


async def test_silent_connections_neither_disturb_clients_nor_the_state_of_engines(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        resource.prlimit(gateway.child.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        async with aiohttp.ClientSession() as connected:
            assert await status(connected, gateway) == 200
            port = int(gateway.url.rpartition(":")[2])
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * FILES)]
            for _ in range(5):
                assert await status(connected, gateway) == 200
                async with aiohttp.ClientSession() as new:
                    assert await status(new, gateway) == 200
            assert await gateway.metric("dps_upstream_failures_total") == 0
            assert await gateway.metric("dps_ready_replicas") == 2
            assert await gateway.metric("dps_client_connections") < FILES / 2
            assert await gateway.metric("dps_client_connections_closed_total", reason="evicted") > FILES
        for _, writer in silent:
            writer.close()

        async def settled() -> bool:
            names = ("dps_client_connections", "dps_in_flight", "dps_queued")
            return sum([await gateway.metric(name) for name in names]) == 0

        await wait_until(settled, "no connection of a client and no request is left")


async def status(http: aiohttp.ClientSession, gateway: Gateway) -> int:
    async with http.post(gateway.url + CHAT, json=chat()) as response:
        await response.read()
        return response.status


async def test_burst_of_silent_connections_does_not_close_those_with_requests(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """The connections wait until the gateway accepts them, because it is stopped meanwhile."""
    async with LocalProcesses(tmp_path) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        resource.prlimit(gateway.child.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        port = int(gateway.url.rpartition(":")[2])
        async with aiohttp.ClientSession() as connected:
            assert await status(connected, gateway) == 200
            os.kill(gateway.child.pid, signal.SIGSTOP)
            try:
                silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * FILES)]
                request = asyncio.create_task(status(connected, gateway))
                await asyncio.sleep(0.1)
            finally:
                os.kill(gateway.child.pid, signal.SIGCONT)
            assert await request == 200
            for _ in range(5):
                assert await status(connected, gateway) == 200
        for _, writer in silent:
            writer.close()
