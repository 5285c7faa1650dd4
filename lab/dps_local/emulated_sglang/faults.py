"""Fault injection: POST /emulate makes requests hang, and streams and the storage fail. SGLang has no such endpoint."""

import asyncio

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from dps_local.emulated_sglang.http import DISCONNECT_AFTER_CHUNKS, Handler, json_response, read_body
from dps_local.emulated_sglang.storage import Failure, Storage

GENERATING_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate", "/health_generate",
)  # fmt: skip


class Faults(BaseModel):
    """The active faults. Each POST replaces all of them; an empty object clears them.

    hang: never answer inference requests or /health_generate, like a scheduler that hangs.
    disconnect_after_chunks: drop the connection of every stream after this many events.
    storage_failure: what the plugin dps_sglang would count for every page that the engine writes or reads.
    storage_tokens_per_second: transfer rate of the storage, instead of that of the command line.
    The last two have no effect on an engine that shares no pages.
    """

    model_config = ConfigDict(extra="forbid")

    hang: bool = False
    disconnect_after_chunks: int | None = Field(default=None, ge=0)
    storage_failure: Failure | None = None
    storage_tokens_per_second: float | None = Field(default=None, gt=0)


class FaultInjection:
    """The faults of one engine, and the middleware that injects them."""

    def __init__(self, storage: Storage | None = None) -> None:
        self.faults = Faults()
        self._storage = storage

    async def set(self, request: web.Request) -> web.Response:
        """POST /emulate."""
        self.faults = await read_body(request, Faults)
        if self._storage is not None:
            rate = self.faults.storage_tokens_per_second
            self._storage.failure = self.faults.storage_failure
            self._storage.tokens_per_second = rate or self._storage.options.tokens_per_second
        return json_response(self.faults.model_dump())

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Inject the faults. Must be the innermost middleware."""
        faults = self.faults
        if faults.hang and request.path in GENERATING_PATHS:
            await asyncio.Event().wait()
        if faults.disconnect_after_chunks is not None:
            request[DISCONNECT_AFTER_CHUNKS] = faults.disconnect_after_chunks
        return await handler(request)
