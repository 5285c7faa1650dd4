"""A gateway in the test's process in front of an engine whose answers the test determines."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import aiohttp
from aiohttp import web

from dps_gateway.runtime import Runtime

CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2}
CHUNK = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chat(**fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}


async def complete(request: web.Request) -> web.StreamResponse:
    """A complete answer with usage."""
    return web.json_response({"id": "c", "choices": [], "usage": USAGE})


class HeldAnswers:
    """Complete answers that an engine sends only after `release` is set."""

    def __init__(self) -> None:
        self.received = asyncio.Event()
        """Set when the first request arrives."""
        self.release = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.received.set()
        await self.release.wait()
        return await complete(request)


async def broken_off(request: web.Request) -> web.StreamResponse:
    """An answer whose connection breaks before its body is complete."""
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"{")
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return response


async def send_stream(
    request: web.Request, pieces: Iterable[bytes], *, status: int = 200, abort: bool = False
) -> web.StreamResponse:
    """Send a stream of these pieces, then end it or break the connection."""
    response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    if abort and request.transport is not None:
        await asyncio.sleep(0.05)
        request.transport.abort()
    return response


class ScriptedEngine:
    """An engine that answers every request with `answer` and records what it received."""

    def __init__(self) -> None:
        self.answer: Answer = complete
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.raw_path, headers, await request.read()))
        return await self.answer(request)

    def stream(self, *pieces: bytes, abort: bool = False) -> None:
        """Answer with a stream of these pieces, then end it or break the connection."""

        async def answer(request: web.Request) -> web.StreamResponse:
            return await send_stream(request, pieces, abort=abort)

        self.answer = answer

    def respond(self, **options: Any) -> None:
        """Answer with a `web.Response` of these options."""

        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(**options)

        self.answer = answer


class InProcessGateway:
    """A gateway in this process in front of a scripted engine."""

    def __init__(self, runtime: Runtime, port: int, client: aiohttp.ClientSession) -> None:
        self.runtime = runtime
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = client

    def requests(self, status: int) -> float:
        """The number of requests that were counted with this status."""
        samples = (s for family in self.runtime.metrics.registry.collect() for s in family.samples)
        return sum(
            s.value for s in samples if s.name == "dps_requests_total" and s.labels["status"] == str(status)
        )

    async def post(self, path: str = CHAT, **options: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        return await self.send("POST", path, **options)

    async def send(self, method: str, path: str, **options: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        async with self.client.request(method, self.url + path, **options) as response:
            return response, await response.read()

    async def raw(self, request: bytes) -> bytes:
        """The response to bytes that an HTTP client would not send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        async with asyncio.timeout(10):
            response = await reader.read()
        writer.close()
        return response


def message_of(content: bytes) -> str:
    """The message of an OpenAI error object."""
    error = json.loads(content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])
