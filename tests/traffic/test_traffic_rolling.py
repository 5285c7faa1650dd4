"""A rolling restart of gateways behind a connection-level load balancer, such as kube-proxy, causes no errors."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dps_local.stack import MODEL
from dps_testkit.http import status_of
from dps_testkit.processes import Gateway, LocalProcesses
from dps_testkit.traffic.load import LoadOptions, traffic

POLL_SECONDS = 0.5
"""Interval of the balancer's readiness checks; until the next one it still uses a terminating gateway."""


class Balancer:
    """Forwards each connection to a gateway that was ready at the last check."""

    def __init__(self, gateways: Sequence[Gateway]) -> None:
        self._gateways = gateways
        self._ready = list(gateways)
        self._random = random.Random(7)

    async def check_readiness(self) -> None:
        while True:
            statuses = [await status_of(f"{gateway.admin}/readyz") for gateway in self._gateways]
            self._ready = [
                gateway for gateway, status in zip(self._gateways, statuses, strict=True) if status == 200
            ]
            await asyncio.sleep(POLL_SECONDS)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(self._random.choice(self._ready).url.rsplit(":", 1)[1])
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(relay(reader, upstream_writer), relay(upstream_reader, writer))
        except OSError:
            writer.close()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def balanced(gateways: Sequence[Gateway]) -> AsyncIterator[str]:
    balancer = Balancer(gateways)
    checks = asyncio.create_task(balancer.check_readiness())
    server = await asyncio.start_server(balancer.connect, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        checks.cancel()
        server.close()


@pytest.mark.timeout(300)
async def test_rolling_restart_of_gateways_causes_no_errors(tmp_path: Path) -> None:
    async with LocalProcesses(tmp_path) as processes:
        engines = await processes.start_engines("speculative", "greedy")
        redis = await processes.start_redis()
        sections: dict[str, dict[str, Any]] = {
            "session": {"redisUrl": redis.url, "redisTimeoutSeconds": 10},
            "timeouts": {"drainDelaySeconds": 8, "drainSeconds": 60},
        }
        gateways = [await processes.start_gateway(engines[:1], engines[1:], sections) for _ in range(2)]
        async with (
            balanced(gateways) as url,
            traffic(LoadOptions(url, MODEL, agents=6, think_seconds=0.05)) as running,
        ):
            await running.observe(30)
            baseline = await running.checkpoint("undisturbed")
            for gateway in gateways:
                await gateway.child.stop(seconds=90)
                gateway.child.start()
                await gateway.child.wait_ready()
                await running.observe(12)
            rolled = await running.checkpoint("rolled")

    assert baseline.unnoticed, baseline.troubles
    assert rolled.unnoticed, rolled.troubles
