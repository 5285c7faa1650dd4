"""Waiting for the state of a gateway and its logs, and checks that nothing is left of requests that have ended."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

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


async def replicas_ready(gateway: Gateway, number: int, **labels: str) -> None:
    """Wait until this number of replicas is ready. `labels` may select a pool."""

    async def counted() -> bool:
        return await gateway.metric("dps_ready_replicas", **labels) == number

    await wait_until(counted, f"{number} replicas are ready")


def entries_of(log: Path) -> list[dict[str, Any]]:
    """The entries of a decision log so far."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


async def decisions(log: Path, number: int) -> list[dict[str, Any]]:
    """The entries of a decision log, once it has this number of them."""

    async def written() -> bool:
        return len(entries_of(log)) == number

    await wait_until(written, f"{number} turns are in the decision log")
    return entries_of(log)


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
