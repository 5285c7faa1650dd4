"""An engine that has dropped its idle connections, as one does that was started again in place."""

import asyncio
import json
from pathlib import Path

import pytest
from support.plane import CHAT, chat, posted
from support.site import Engine, Gateway, Site

from dps_lab.children import Child

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


async def test_a_request_that_met_dropped_connections_is_sent_on_a_new_one(tmp_path: Path) -> None:
    engine = Forgetful()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)

    async def never() -> bool:
        return False

    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    only = [Engine(Child("forgetful", [], Path(), never), url)]
    async with Site(tmp_path) as site:
        gateway = await site.gateway(only, only)
        await asyncio.gather(*(status(gateway) for _ in range(CONNECTIONS)))
        assert await status(gateway) == 200
        assert engine.chats == CONNECTIONS + 1
    server.close()


async def status(gateway: Gateway) -> int:
    async with posted(gateway.url + CHAT, chat()) as response:
        await response.read()
        return response.status
