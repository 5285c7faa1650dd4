"""An engine that closes idle connections on the next request, as after a restart."""

import asyncio
import json
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


async def test_request_on_stale_connections_is_retried_on_a_fresh_one(tmp_path: Path) -> None:
    engine = EngineWithStaleConnections()

    async def never() -> bool:
        return False

    async with (
        await asyncio.start_server(engine.serve, "127.0.0.1", 0) as server,
        LocalProcesses(tmp_path) as processes,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        only = Engine(Child("stale", [], Path(), never), url)
        gateway = await processes.start_gateway([only], [only])
        await asyncio.gather(*(status(gateway) for _ in range(CONNECTIONS)))
        assert await status(gateway) == 200
        assert engine.chats == CONNECTIONS + 1


async def status(gateway: Gateway) -> int:
    async with posted(gateway.url + CHAT, chat()) as response:
        await response.read()
        return response.status
