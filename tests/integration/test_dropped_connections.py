"""Engines that drop connections without a word: idle ones, as after a crash, or every one that brings work."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from dps_local.processes import Child
from dps_testkit.plane import CHAT, chat, posted
from dps_testkit.processes import Engine, Gateway, Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

CONNECTIONS = 4
MODELS = {"object": "list", "data": []}
ANSWER = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}],
}


class Forgetful:
    """Answers the first chat request of each connection, several at a time; the second one finds it dropped."""

    def __init__(self) -> None:
        self.chats = 0
        self._together = asyncio.Barrier(CONNECTIONS)

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
                        await self._together.wait()
                body = json.dumps(ANSWER if head.startswith(b"POST") else MODELS).encode()
                status = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                writer.write(status % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


class Dying:
    """Well by its health, but drops every connection that brings a chat request: killed, and not yet gone."""

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
async def served(engine: Forgetful | Dying) -> AsyncIterator[Engine]:
    """The engine, listening on a port of its own."""

    async def never() -> bool:
        return False

    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield Engine(Child(type(engine).__name__, [], Path(), never), url)
    server.close()


async def test_a_request_that_met_dropped_connections_is_sent_on_a_new_one(tmp_path: Path) -> None:
    engine = Forgetful()
    async with served(engine) as only, Site(tmp_path) as site:
        gateway = await site.gateway([only], [only])
        await asyncio.gather(*(status(gateway) for _ in range(CONNECTIONS)))
        assert await status(gateway) == 200
        assert engine.chats == CONNECTIONS + 1


async def test_a_request_whose_engine_is_dying_is_answered_by_the_next(tmp_path: Path) -> None:
    dying = Dying()
    async with served(dying) as first, Site(tmp_path) as site:
        (second,) = await site.engines("greedy")
        gateway = await site.gateway([first], [second], {"routing": {"thresholdTokens": None}})
        assert await status(gateway) == 200
        assert dying.chats == 2, "once more on a new connection, and then elsewhere"


async def test_a_request_that_kills_engines_is_not_carried_through_all_of_them(tmp_path: Path) -> None:
    engines = [Dying() for _ in range(3)]
    async with AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(served(one)) for one in engines]
        site = await stack.enter_async_context(Site(tmp_path))
        gateway = await site.gateway([first, second], [third], {"routing": {"thresholdTokens": None}})
        assert await status(gateway) == 502
        assert sorted(engine.chats for engine in engines) == [0, 1, 2]


async def status(gateway: Gateway) -> int:
    async with posted(gateway.url + CHAT, chat()) as response:
        await response.read()
        return response.status
