"""What a server answers if its queue is full, and if it aborts a request. The server runs one request, and queues one.

Numbers of generated tokens depend on time, so they are described as `"<some>"` unless they are 0.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from dps_testkit.engine_contract.exchange import CHAT, MODEL, load, requests, send
from dps_testkit.engine_contract.observe import Shape, describe, runs

LIMITS: Final = ("--max-running-requests", "1", "--max-queued-requests", "1")
"""The flags of such a server."""

SOME_TOKENS: Final = 100
"""A server that uses so much of its cache for a request has generated some tokens of the answer."""

_LONG: Final = 4000
_QUESTION: Final = [{"role": "user", "content": "Tell me a story."}]
_LONG_GENERATION: Final = {"text": "Once", "sampling_params": {"max_new_tokens": _LONG, "ignore_eos": True}}
_REQUESTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (CHAT, {"messages": _QUESTION, "max_tokens": _LONG, "ignore_eos": True}),
    "completions": ("/v1/completions", {"prompt": "Once", "max_tokens": _LONG, "ignore_eos": True}),
    "messages": ("/v1/messages", {"messages": _QUESTION, "max_tokens": _LONG}),
    "responses": ("/v1/responses", {"input": "Tell me a story.", "max_output_tokens": _LONG}),
    "generate": ("/generate", _LONG_GENERATION),
}
"""A request for each API, with a limit of tokens that takes minutes to generate."""


async def refusals(session: aiohttp.ClientSession) -> dict[str, Shape]:
    """The answers of an idle server, by the API, the cause, and whether they are streamed."""
    found: dict[str, Shape] = {}
    cases = [(api, stream) for api in _REQUESTS for stream in (False, True)]
    async with others(session, 2):
        for api, stream in cases:
            found[_name(api, "full queue", stream)] = await _ask(session, api, stream)
    for api, stream in cases:
        await _flush(session)
        async with others(session, 1):
            answer = asyncio.create_task(_ask(session, api, stream))
            await has(session, 2)
        found[_name(api, "aborted in the queue", stream)] = await answer
        await _flush(session)
        answer = asyncio.create_task(_ask(session, api, stream))
        await _until(session, lambda load: load["num_used_tokens"] >= SOME_TOKENS)
        await abort(session)
        found[_name(api, "aborted while it is running", stream)] = await answer
    return found


def _name(api: str, cause: str, stream: bool) -> str:
    return f"{api}: {cause}{', stream' if stream else ''}"


async def _ask(session: aiohttp.ClientSession, api: str, stream: bool) -> Shape:
    path, fields = _REQUESTS[api]
    body = {"model": MODEL, "stream": stream, **fields}
    return _without_times(describe(await send(session, {"method": "POST", "path": path, "body": body})))


@asynccontextmanager
async def others(session: aiohttp.ClientSession, count: int) -> AsyncIterator[None]:
    """Keep `count` requests of another client running or waiting. At the end, all requests are aborted."""
    sent = []
    for number in range(1, count + 1):
        sent.append(asyncio.create_task(session.post("/generate", json=_LONG_GENERATION)))
        await has(session, number)
    yield
    await abort(session)
    await asyncio.gather(*sent, return_exceptions=True)


async def abort(session: aiohttp.ClientSession) -> None:
    """Abort all requests, and wait until none is running or waiting."""
    async with session.post("/abort_request", json={"abort_all": True}) as response:
        assert response.status == 200
    await has(session, 0)


async def has(session: aiohttp.ClientSession, count: int) -> None:
    """Wait until `count` requests are running or waiting."""
    await _until(session, lambda load: requests(load) == count)


async def _until(session: aiohttp.ClientSession, holds: Callable[[Mapping[str, int]], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds(await load(session)):  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(0.05)


async def _flush(session: aiohttp.ClientSession) -> None:
    async with session.post("/flush_cache") as response:
        assert response.status == 200


def _without_times(value: Shape, key: str = "") -> Shape:
    match value:
        case dict():
            return {name: _without_times(each, name) for name, each in value.items()}
        case list():
            return runs([_without_times(each) for each in value])
        case int() if value and key in ("completion_tokens", "output_tokens", "total_tokens"):
            return "<some>"
        case "" if key == "text":  # the engine holds back an incomplete character
            return "<str>"
        case _:
            return value
