"""Redis behind TLS, Sentinel and Cluster, on 127.0.0.1."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from dps_local.processes import free_ports
from dps_local.redis_server import REDIS_SERVER
from dps_testkit.processes import LocalProcesses, RedisServer
from dps_testkit.waiting import wait_until

CLUSTER_BUS = 10_000
"""The cluster bus of a node listens on the node's port plus this offset."""
SLOTS = 16_384
MASTER = "sessions"
"""The name by which sentinels know the master."""


async def execute(client: Redis, *command: str | int) -> Any:
    """Run a command for which the client library has no method."""
    call: Any = client.execute_command
    return await call(*command)


@asynccontextmanager
async def tls_in_front_of(server: RedisServer, certificate: Path, key: Path) -> AsyncIterator[int]:
    """Run a TLS terminator, because not every build of the server supports TLS; yields its port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def terminate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, plain_writer), pump(plain_reader, writer))

    listener = await asyncio.start_server(terminate, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


async def monitored(
    processes: LocalProcesses, master: RedisServer, binary: Path = REDIS_SERVER
) -> RedisServer:
    """Start a sentinel that monitors a master as MASTER."""
    sentinel = await processes.start_redis("--sentinel", binary=binary)
    async with sentinel.client() as client:
        await execute(client, "SENTINEL", "MONITOR", MASTER, "127.0.0.1", master.port, 1)
        for option, value in (("down-after-milliseconds", 1000), ("failover-timeout", 10_000)):
            await execute(client, "SENTINEL", "SET", MASTER, option, value)
    return sentinel


async def replica_discovered(sentinel: RedisServer) -> None:
    """Wait until a sentinel has discovered the only replica of MASTER."""
    async with sentinel.client() as client:

        async def discovered() -> bool:
            return len(await execute(client, "SENTINEL", "REPLICAS", MASTER)) == 1

        await wait_until(discovered, "the sentinel has discovered the replica")


async def replicated(master: Redis) -> None:
    """Wait until a replica has everything that was written to the master. `master` is a client of it."""

    async def copied() -> bool:
        return bool(await master.wait(1, 1000))

    await wait_until(copied, "all writes are replicated")


def _cluster_ports(count: int) -> list[int]:
    """Free ports whose cluster bus ports are also free."""

    def is_free(port: int) -> bool:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
        return True

    low = (port for port in free_ports(200) if port < 2 * CLUSTER_BUS)
    return [port for port in low if is_free(port + CLUSTER_BUS)][:count]


async def clustered(processes: LocalProcesses, binary: Path = REDIS_SERVER) -> list[RedisServer]:
    """Start the three masters of a cluster."""
    nodes = [
        await processes.start_redis("--cluster-enabled", "yes", binary=binary, port=port)
        for port in _cluster_ports(3)
    ]
    for index, node in enumerate(nodes):
        async with node.client() as admin:
            share = range(SLOTS * index // len(nodes), SLOTS * (index + 1) // len(nodes))
            await execute(admin, "CLUSTER", "ADDSLOTS", *share)
            await execute(admin, "CLUSTER", "MEET", "127.0.0.1", nodes[0].port)

    async def formed() -> bool:
        for node in nodes:
            async with node.client() as admin:
                lines = (await execute(admin, "CLUSTER", "INFO")).decode().split()
                if not {"cluster_state:ok", f"cluster_known_nodes:{len(nodes)}"} <= set(lines):
                    return False
        return True

    await wait_until(formed, "the cluster is formed")
    return nodes
