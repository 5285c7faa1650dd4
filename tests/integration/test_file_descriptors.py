"""A gateway with few file descriptors, and clients that open many connections without sending a request."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from dps_testkit.data_plane import CHAT, chat
from dps_testkit.leftovers import leaking_no_files, settled
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

FILES = 130


@asynccontextmanager
async def gateway_with_few_files(folder: Path, engines: tuple[Engine, Engine]) -> AsyncIterator[Gateway]:
    """A gateway that may open FILES files. At the end no request and no connection of a client is left."""
    async with LocalProcesses(folder) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        resource.prlimit(gateway.child.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        async with leaking_no_files(gateway):
            yield gateway

        async def disconnected() -> bool:
            return await gateway.metric("dps_client_connections") == 0

        await wait_until(disconnected, "no client is connected")
        await settled(gateway, *engines)


async def opened(base_url: str) -> list[asyncio.StreamWriter]:
    """Twice as many connections as the gateway may open files, on which no request is sent."""
    port = int(base_url.rpartition(":")[2])
    return [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(2 * FILES)]


async def status(http: aiohttp.ClientSession, gateway: Gateway) -> int:
    async with http.post(gateway.url + CHAT, json=chat()) as response:
        await response.read()
        return response.status


async def test_silent_connections_neither_disturb_clients_nor_the_state_of_engines(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with gateway_with_few_files(tmp_path, engines) as gateway:
        async with aiohttp.ClientSession() as connected:
            assert await status(connected, gateway) == 200
            silent = await opened(gateway.url)
            for _ in range(5):
                assert await status(connected, gateway) == 200
                async with aiohttp.ClientSession() as new:
                    assert await status(new, gateway) == 200
            assert await gateway.metric("dps_upstream_failures_total") == 0
            assert await gateway.metric("dps_ready_replicas") == 2
            assert await gateway.metric("dps_client_connections") < FILES / 2
            assert await gateway.metric("dps_client_connections_closed_total", reason="evicted") > FILES
        for writer in silent:
            writer.close()


async def test_burst_of_silent_connections_does_not_close_those_with_requests(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """The connections wait until the gateway accepts them, because it is stopped meanwhile."""
    async with gateway_with_few_files(tmp_path, engines) as gateway:
        async with aiohttp.ClientSession() as connected:
            assert await status(connected, gateway) == 200
            os.kill(gateway.child.pid, signal.SIGSTOP)
            try:
                silent = await opened(gateway.url)
                request = asyncio.create_task(status(connected, gateway))
                await asyncio.sleep(0.1)
            finally:
                os.kill(gateway.child.pid, signal.SIGCONT)
            assert await request == 200
            for _ in range(5):
                assert await status(connected, gateway) == 200
        for writer in silent:
            writer.close()


async def test_silent_connections_to_the_admin_port_disturb_neither_clients_nor_probes(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with gateway_with_few_files(tmp_path, engines) as gateway:
        silent = await opened(gateway.admin)
        for _ in range(5):
            async with aiohttp.ClientSession() as new:
                assert await status(new, gateway) == 200
                async with new.get(f"{gateway.admin}/readyz") as response:
                    assert response.status == 200
        assert await gateway.metric("dps_upstream_failures_total") == 0
        assert await gateway.metric("dps_ready_replicas") == 2
        for writer in silent:
            writer.close()
