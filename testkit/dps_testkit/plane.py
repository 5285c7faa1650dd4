"""Requests against slow engines behind a gateway, so that a test can catch them under way."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from dps_testkit.http import metric
from dps_testkit.processes import Engine, Gateway, Site

CHAT = "/v1/chat/completions"
STEP_SECONDS = 0.02
SLOW = ("--emulate-decode-step-seconds", str(STEP_SECONDS), "0.0001")
MAX_BODY_BYTES = 100_000


def chat(tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A chat request whose answer has so many tokens."""
    return {
        "model": "any",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        **fields,
    }


USAGE_ASKED: dict[str, Any] = {"stream_options": {"include_usage": True}}
ENDLESS = chat(20_000)
ENDLESS_STREAM = chat(20_000, stream=True)


@dataclass(frozen=True)
class Plane:
    """A gateway that sends everything to the greedy engine, one request at a time, and lets one more wait."""

    site: Site
    speculative: Engine
    greedy: Engine
    gateway: Gateway

    async def in_flight(self) -> float:
        return await self.gateway.metric("dps_in_flight")

    async def idle(self) -> bool:
        return await self.greedy.running() == 0 and await self.in_flight() == 0

    async def aborted(self) -> float:
        return await metric(self.greedy.url, "sglang:num_aborted_requests_total")


@asynccontextmanager
async def posted(url: str, body: Mapping[str, Any], **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to a POST on a connection of its own, which is cut when the block is left early."""
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        yield response


async def read(url: str, body: Mapping[str, Any]) -> bytes:
    async with posted(url, body) as response:
        assert response.status == 200
        return await response.read()


async def refusal(response: aiohttp.ClientResponse) -> tuple[int, str, str, str | None]:
    """Status, type and code of an OpenAI error object, and Retry-After."""
    error = (await response.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status, error["type"], error["code"], response.headers.get("Retry-After")
