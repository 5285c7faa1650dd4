"""Gateways are rolled one after the other behind a balancer of connections, as kube-proxy is one: nobody notices."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dps_local.stack import MODEL
from dps_testkit.http import status_of
from dps_testkit.processes import Gateway, Site
from dps_testkit.traffic.flow import Flow, traffic

LATE_SECONDS = 0.5
"""How often the balancer looks who is ready: it hears late of one that goes away."""


class Balancer:
    """Passes each connection to a gateway that was ready when it last looked."""

    def __init__(self, gateways: Sequence[Gateway]) -> None:
        self._gateways = gateways
        self._ready = list(gateways)
        self._random = random.Random(7)

    async def look(self) -> None:
        while True:
            asked = [await status_of(f"{gateway.admin}/readyz") for gateway in self._gateways]
            self._ready = [
                gateway for gateway, status in zip(self._gateways, asked, strict=True) if status == 200
            ]
            await asyncio.sleep(LATE_SECONDS)

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
    looking = asyncio.create_task(balancer.look())
    server = await asyncio.start_server(balancer.connect, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        looking.cancel()
        server.close()


@pytest.mark.timeout(300)
async def test_rolling_gateways_is_not_noticed(tmp_path: Path) -> None:
    async with Site(tmp_path) as site:
        engines = await site.engines("speculative", "greedy")
        redis = await site.redis()
        sections: dict[str, dict[str, Any]] = {
            "session": {"redisUrl": redis.url, "redisTimeoutSeconds": 10},
            "timeouts": {"drainDelaySeconds": 8, "drainSeconds": 60},
        }
        gateways = [await site.gateway(engines[:1], engines[1:], sections) for _ in range(2)]
        async with (
            balanced(gateways) as url,
            traffic(Flow(url, MODEL, agents=6, think_seconds=0.05)) as under_way,
        ):
            await under_way.observe(30)
            calm = await under_way.checkpoint("undisturbed")
            for gateway in gateways:
                await gateway.child.stop(seconds=90)
                gateway.child.start()
                await gateway.child.wait_ready()
                await under_way.observe(12)
            rolled = await under_way.checkpoint("rolled")

    assert calm.unnoticed, calm.troubles
    assert rolled.unnoticed, rolled.troubles
