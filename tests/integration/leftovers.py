"""Checks that nothing is left of requests that have ended."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from dps_testkit.processes import Engine, Gateway
from dps_testkit.waiting import wait_until

IDLE_CONNECTIONS: Final = 4
"""Connections that a gateway keeps for later requests and checks if its clients send one request at a time."""


async def settled(gateway: Gateway, *engines: Engine) -> None:
    """Wait until no request is in flight or queued, neither in the gateway nor in the engines."""

    async def idle() -> bool:
        in_gateway = await gateway.metric("dps_in_flight") + await gateway.metric("dps_queued")
        return in_gateway + sum([await engine.running() for engine in engines]) == 0

    await wait_until(idle, "no request is in flight")


@asynccontextmanager
async def leaking_no_files(gateway: Gateway, idle_connections: int = IDLE_CONNECTIONS) -> AsyncIterator[None]:
    """Check that the gateway has closed all sockets and files that it has opened, except a few idle connections."""
    before = _open_files(gateway)
    yield

    async def closed() -> bool:
        return _open_files(gateway) <= before + idle_connections

    await wait_until(closed, "the connections of failed requests are closed")


def _open_files(gateway: Gateway) -> int:
    """The number of the gateway's file descriptors."""
    return len(list(Path(f"/proc/{gateway.child.pid}/fd").iterdir()))
