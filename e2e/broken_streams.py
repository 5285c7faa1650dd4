"""Streams of real engines that break off, and that another engine continues."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from dps_engines.pools import PoolName
from dps_local.stack import MODEL, LocalStack, StackOptions

EVENTS_BEFORE_FAILURE = 6
TOKENS = 48
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "And then?"}]}
SAMPLING: dict[str, Any] = {"temperature": 1, "ignore_eos": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": TOKENS, **SAMPLING, **USAGE},
    "/v1/completions": {
        "model": MODEL,
        "prompt": "And then there was",
        "max_tokens": TOKENS,
        **SAMPLING,
        **USAGE,
    },
}
"""Requests to any engine, by path."""
GENERATE: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": "And then there was",
        "sampling_params": {"max_new_tokens": TOKENS, **SAMPLING},
        "stream": True,
    }
}
"""A request to SGLang only."""
JSON = {"Content-Type": "application/json"}


async def check_continued(
    engines: Mapping[PoolName, str], model: Path, requests: Mapping[str, dict[str, Any]]
) -> None:
    """Assert that the greedy engine continues streams that break off on the speculative one.

    `engines` are base URLs by pool, and `model` is the folder of the model that they serve.
    """
    async with _breaking(engines["speculative"]) as url:
        urls: dict[PoolName, str] = {"speculative": url, "greedy": engines["greedy"]}
        options = StackOptions(tokenizer=model, policy="AlwaysSpeculative", engine_urls=urls)
        async with LocalStack(options) as stack, aiohttp.ClientSession() as client:
            for path, body in requests.items():
                alone = await _events(client, engines["greedy"] + path, body)
                events = await _events(client, stack.urls[0].removesuffix("/v1") + path, body)
                assert len(events) > EVENTS_BEFORE_FAILURE, path
                assert not any("error" in event for event in events), events[-1]
                assert len({_id(event) for event in events}) == 1
                assert [_tokens(event) for event in (events[-1], alone[-1])] == [_tokens(alone[-1])] * 2
                assert _tokens(events[-1])[1] == TOKENS


@asynccontextmanager
async def _breaking(engine: str) -> AsyncIterator[str]:
    """A relay to an engine that breaks off every stream. Yields its base URL."""

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with (
            aiohttp.ClientSession() as client,
            client.request(request.method, engine + request.raw_path, data=body, headers=JSON) as answer,
        ):
            headers = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
            if not headers["Content-Type"].startswith("text/event-stream"):
                return web.Response(status=answer.status, body=await answer.read(), headers=headers)
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            for _ in range(EVENTS_BEFORE_FAILURE):
                await response.write(await answer.content.readuntil(b"\n\n"))
            await asyncio.sleep(0.1)
            assert request.transport is not None
            request.transport.abort()
            return response

    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _events(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON objects in the events of a streamed answer."""
    async with client.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return [
            json.loads(line.removeprefix(b"data: "))
            async for line in response.content
            if line.startswith(b"data: {")
        ]


def _id(event: dict[str, Any]) -> Any:
    return event.get("id") or event["meta_info"]["id"]


def _tokens(event: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt and of the answer."""
    usage = event.get("usage") or event["meta_info"]
    return usage["prompt_tokens"], usage["completion_tokens"]
