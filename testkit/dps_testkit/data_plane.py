"""Requests to a gateway with slow engines, so that a test can act while they are in flight."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from dps_local.stack import MODEL
from dps_testkit.http import metric
from dps_testkit.processes import Engine, Gateway, LocalProcesses

CHAT = "/v1/chat/completions"
STEP_SECONDS = 0.02
SLOW = ("--emulate-decode-step-seconds", str(STEP_SECONDS), "0.0001")
MAX_BODY_BYTES = 100_000


def chat(tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A chat request whose answer has exactly `tokens` tokens."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        **fields,
    }


def common_cache(folder: Path) -> list[str]:
    """The flags of emulated engines that share a prefix cache in this folder."""
    return [
        *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", "mooncake", "--emulate-storage-directory", str(folder)),
    ]


WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
ENDLESS = chat(20_000)
ENDLESS_STREAM = chat(20_000, stream=True)


@dataclass(frozen=True)
class DataPlane:
    """A gateway that sends all requests to the greedy engine: one in flight, one queued, more are refused."""

    processes: LocalProcesses
    speculative: Engine
    greedy: Engine
    gateway: Gateway

    async def in_flight(self) -> float:
        """Requests that the gateway has sent to engines and that are not finished."""
        return await self.gateway.metric("dps_in_flight")

    async def idle(self) -> bool:
        """Whether neither the gateway nor the greedy engine has a request."""
        return await self.greedy.running() == 0 and await self.in_flight() == 0

    async def aborted(self) -> float:
        """Requests that the greedy engine has aborted so far."""
        return await metric(self.greedy.url, "sglang:num_aborted_requests_total")


@asynccontextmanager
async def posted(url: str, body: Mapping[str, Any], **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """POST on a fresh connection, which is closed when the block exits, even if the answer is incomplete."""
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        yield response


async def read(url: str, body: Mapping[str, Any]) -> bytes:
    """The body of a successful POST."""
    async with posted(url, body) as response:
        assert response.status == 200
        return await response.read()


async def refusal(response: aiohttp.ClientResponse) -> tuple[int, str, str, str | None]:
    """Status, type and code of an OpenAI error object, and Retry-After."""
    error = (await response.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status, error["type"], error["code"], response.headers.get("Retry-After")
