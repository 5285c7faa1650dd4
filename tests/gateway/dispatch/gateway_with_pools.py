"""A gateway in the test's process whose engines each answer every request in the same way."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient

from dps_gateway.runtime import Runtime
from dps_testkit.in_process_gateway import broken_off

CHAT = "/v1/chat/completions"
ANSWER = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}


class FixedStatusEngine:
    """Answers every request with `status`, after `delay` seconds. If `truncated`, its answers are incomplete."""

    def __init__(self, status: int = 200, delay: float = 0.0, truncated: bool = False) -> None:
        self.status = status
        self.delay = delay
        self.truncated = truncated
        self.requests = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        await asyncio.sleep(self.delay)
        if self.status != 200:
            return web.json_response({"error": {"message": "scripted"}}, status=self.status)
        if self.truncated:
            return await broken_off(request)
        if (await request.json()).get("stream"):
            return web.Response(text="data: [DONE]\n\n", content_type="text/event-stream")
        return web.json_response(ANSWER)


class GatewayWithPools:
    """A gateway between one client and two pools of engines."""

    def __init__(
        self, runtime: Runtime, client: TestClient[Any, Any], engines: list[FixedStatusEngine]
    ) -> None:
        self.runtime = runtime
        self._client = client
        self._engines = engines

    @property
    def attempts(self) -> int:
        """Requests that any engine has received."""
        return sum(engine.requests for engine in self._engines)

    async def post(
        self, number: int = 0, headers: Mapping[str, str] | None = None, path: str = CHAT, **fields: Any
    ) -> ClientResponse:
        """One request of session `number`."""
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        headers = {"x-session-id": str(number), **(headers or {})}
        response = await self._client.post(path, json=body, headers=headers)
        await response.read()
        return response


Start = Callable[..., Awaitable[GatewayWithPools]]
"""Starts a gateway with these speculative and greedy engines (fixture `start` in tests/gateway/dispatch)."""


def engines(
    count: int, status: int = 200, delay: float = 0.0, truncated: bool = False
) -> list[FixedStatusEngine]:
    """Engines of one pool, which all answer alike."""
    return [FixedStatusEngine(status, delay, truncated) for _ in range(count)]
