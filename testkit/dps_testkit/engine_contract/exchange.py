"""Sends the contract's requests, in the same way to a real and an emulated server."""

import asyncio
import json

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from dps_testkit.engine_contract.cases import CHAT, JSON, MODEL, Case
from dps_testkit.engine_contract.observe import Answer


async def send(session: aiohttp.ClientSession, case: Case) -> Answer:
    """The complete answer to `case` from the server at the HTTP client's base URL."""
    raw = isinstance(case.body, bytes)
    body = case.body if raw or case.body is None else json.dumps(case.body).encode()
    headers = case.headers if raw or case.body is None else JSON
    async with session.request(case.method, case.path, data=body, headers=headers) as answer:
        return Answer(
            answer.status,
            {name.lower(): value for name, value in answer.headers.items()},
            await answer.read(),
        )


async def leave(session: aiohttp.ClientSession, *, stream: bool) -> None:
    """Request a long answer and disconnect: after a stream's first bytes, or once the request is running."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Leave {stream}"}], "stream": stream}
    request = asyncio.create_task(session.post(CHAT, json=body | {"max_tokens": 4000, "ignore_eos": True}))
    if stream:
        answer = await request
        await answer.content.readany()
        answer.close()
        return
    while await running(session) == 0:  # noqa: ASYNC110 - another process's state has no event
        await asyncio.sleep(0.05)
    request.cancel()
    await asyncio.wait([request])


async def aborted(session: aiohttp.ClientSession) -> float:
    """The number of requests that the server has aborted so far."""
    name = "sglang:num_aborted_requests_total"
    families = text_string_to_metric_families(await exposition(session))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


async def running(session: aiohttp.ClientSession) -> int:
    """The number of running and waiting requests that the server reports."""
    async with session.get("/v1/loads") as answer:
        loads = (await answer.json())["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def after_leaving(session: aiohttp.ClientSession, *, stream: bool) -> dict[str, float]:
    """Disconnect during an answer. Returns the numbers of requests that were aborted and that still run."""
    before = await aborted(session)
    await leave(session, stream=stream)
    while (left := await running(session)) or await aborted(session) == before:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.05)
    return {"aborted": await aborted(session) - before, "running": left}


async def exposition(session: aiohttp.ClientSession) -> str:
    """The server's metrics as Prometheus text."""
    async with session.get("/metrics") as answer:
        return await answer.text()
