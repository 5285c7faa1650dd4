"""Engines that close connections without answering: idle connections, as after a restart, or all with a request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dps_local.processes import Child
from dps_testkit.data_plane import CHAT, chat, posted
from dps_testkit.processes import Engine, Gateway, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

CONNECTIONS = 4
MODELS = {"object": "list", "data": []}
ANSWER = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}],
}


class EngineWithStaleConnections:
    """Answers the first chat request on each connection and closes the connection on the second one.

    The first answers are sent only once CONNECTIONS requests have arrived, so that each is on its own connection.
    """

    def __init__(self) -> None:
        self.chats = 0
        self._all_open = asyncio.Barrier(CONNECTIONS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        used = False
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (line for line in head.lower().splitlines() if b"content-length" in line), b":0"
                )
                await reader.readexactly(int(length.split(b":")[1]))
                if head.startswith(b"POST"):
                    if used:
                        break
                    used = True
                    self.chats += 1
                    if self.chats <= CONNECTIONS:
                        await self._all_open.wait()
                body = json.dumps(ANSWER if head.startswith(b"POST") else MODELS).encode()
                status = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                writer.write(status % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


class CrashingEngine:
    """Passes health checks, but closes every connection on a chat request, like an engine about to crash."""

    def __init__(self) -> None:
        self.chats = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            self.chats += 1
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def served(engine: EngineWithStaleConnections | CrashingEngine) -> AsyncIterator[Engine]:
    """Serve the engine on a free port."""

    async def never() -> bool:
        return False

    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield Engine(Child(type(engine).__name__, [], Path(), never), url)
    server.close()


async def test_request_on_stale_connections_is_retried_on_a_fresh_one(tmp_path: Path) -> None:
    engine = EngineWithStaleConnections()
    async with served(engine) as only, LocalProcesses(tmp_path) as processes:
        gateway = await processes.start_gateway([only], [only])
        await asyncio.gather(*(status(gateway) for _ in range(CONNECTIONS)))
        assert await status(gateway) == 200
        assert engine.chats == CONNECTIONS + 1


async def test_request_to_crashing_engine_fails_over(tmp_path: Path) -> None:
    crashing = CrashingEngine()
    async with served(crashing) as first, LocalProcesses(tmp_path) as processes:
        (second,) = await processes.start_engines("greedy")
        gateway = await processes.start_gateway([first], [second], {"routing": {"thresholdTokens": None}})
        assert await status(gateway) == 200
        assert crashing.chats == 2, "one retry on a fresh connection before the failover"


async def status(gateway: Gateway) -> int:
    async with posted(gateway.url + CHAT, chat()) as response:
        await response.read()
        return response.status
