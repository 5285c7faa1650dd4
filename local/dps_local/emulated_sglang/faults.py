"""Fault injection, which no real engine has: POST /emulate makes this one fail, hang or dawdle."""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ConfigDict, Field

from dps_local.emulated_sglang.http import (
    DISCONNECT_AFTER_CHUNKS,
    Handler,
    error_response,
    json_response,
    read_body,
)

INFERENCE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})


class Faults(BaseModel):
    """What goes wrong from now on. Every POST replaces it all; an empty object heals.

    The next `fail_next` requests get `status`; every request waits `latency_seconds` (real ones) first, or
    for ever if `hang`; every stream breaks off after `disconnect_after_chunks` events; an engine that is
    not `ready` says so to its probes.
    """

    model_config = ConfigDict(extra="forbid")

    fail_next: int = Field(default=0, ge=0)
    status: int = Field(default=500, ge=400, le=599)
    latency_seconds: float = Field(default=0.0, ge=0)
    hang: bool = False
    disconnect_after_chunks: int | None = Field(default=None, ge=0)
    ready: bool = True


class FaultInjection:
    """The state of one engine's faults, and the middleware that makes them happen."""

    def __init__(self) -> None:
        self.faults = Faults()

    async def set(self, request: web.Request) -> web.Response:
        """POST /emulate."""
        self.faults = await read_body(request, Faults)
        return await self.get(request)

    async def get(self, _request: web.Request) -> web.Response:
        """GET /emulate."""
        return json_response(self.faults.model_dump())

    @property
    def middleware(self) -> Middleware:
        """To be the innermost middleware."""

        @web.middleware
        async def inject(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path not in INFERENCE_PATHS:
                return await handler(request)
            faults = self.faults
            if faults.hang:
                await asyncio.Event().wait()
            if faults.latency_seconds:
                await asyncio.sleep(faults.latency_seconds)
            if faults.fail_next:
                faults.fail_next -= 1
                return error_response("Failed on purpose.", "InternalServerError", faults.status)
            if faults.disconnect_after_chunks is not None:
                request[DISCONNECT_AFTER_CHUNKS] = faults.disconnect_after_chunks
            return await handler(request)

        return inject
