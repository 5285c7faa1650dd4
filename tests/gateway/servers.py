"""Servers that a gateway asks, an engine whose answers the test determines, and changes of the configuration."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_gateway.runtime import Runtime
from dps_testkit.waiting import wait_until


@asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], *paths: str
) -> AsyncIterator[str]:
    """The URL of a server with this handler for these paths."""
    app = web.Application()
    for path in paths:
        app.router.add_route("*", path, handler)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def configure(runtime: Runtime, section: str, **values: Any) -> None:
    """Change values of one section of a gateway's configuration, as a reload or a restart does."""
    changed = getattr(runtime.config, section).model_copy(update=values)
    config = runtime.config.model_copy(update={section: changed})
    runtime.apply(config)
    runtime.config = config


async def until(condition: Callable[[], bool], description: str) -> None:
    """Wait until `condition` is true. Raises AssertionError with `description` after a time limit."""

    async def holds() -> bool:
        return condition()

    await wait_until(holds, description)


class AskedEngine:
    """Answers every request with `status` and `body`, or not at all if the status is None."""

    def __init__(self, body: bytes = b"") -> None:
        self.status: int | None = 200
        self.body = body
        self.keys: list[str | None] = []
        """The Authorization header of each request."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        if self.status is None:
            await asyncio.sleep(3600)
        return web.Response(status=self.status or 200, body=self.body)

    async def asked(self) -> None:
        """Wait for the second next request, when the answer to the next one has been processed."""
        enough = len(self.keys) + 2
        await until(lambda: len(self.keys) >= enough, "the engine is asked twice")
