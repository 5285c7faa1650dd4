"""Sends the contract's requests, in the same way to a real and an emulated server.

The requests are those of the recording, in which further ones can be added by hand before it is repeated. Their order
matters: `cached_tokens` depends on the content of the prefix cache when a request arrives. Output lengths are compared
and output text is not, so requests set a fixed number of tokens.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from dps_testkit.engine_contract.observe import Answer, Shape, describe
from dps_testkit.paths import ROOT

RECORDING = ROOT / "tests/local/contract/sglang-0.5.23.json"
MODEL = "Qwen/Qwen2.5-7B-Instruct"
CHAT = "/v1/chat/completions"
TOO_LONG = "word " * 32_868
"""The text that a recorded request has as `<too long>`."""
Case = Mapping[str, Any]
"""A recorded request: name, method and path, `body` (JSON) or `raw` with a `content_type`, and the described answer."""


def recorded() -> dict[str, Any]:
    """The contract: the cases of a greedy and of a speculative server, and what else was observed."""
    contract: dict[str, Any] = json.loads(RECORDING.read_text())
    return contract


def write(contract: Mapping[str, Any]) -> None:
    """Replace the recording. Each case is one line."""
    sections = []
    for name, value in contract.items():
        if isinstance(value, list):
            lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in value)
            sections.append(f"{json.dumps(name)}: [\n{lines}\n]")
        else:
            sections.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    RECORDING.write_text("{\n" + ",\n".join(sections) + "\n}\n")


async def send(session: aiohttp.ClientSession, case: Case) -> Answer:
    """The complete answer to `case` from the server at the HTTP client's base URL."""
    data, headers = None, {}
    if "raw" in case:
        data, headers = case["raw"].encode(), {"content-type": case["content_type"]}
    elif "body" in case:
        text = json.dumps(case["body"]).replace('"<too long>"', json.dumps(TOO_LONG))
        data, headers = text.encode(), {"content-type": "application/json"}
    async with session.request(case["method"], case["path"], data=data, headers=headers) as answer:
        return Answer(
            answer.status,
            {name.lower(): value for name, value in answer.headers.items()},
            await answer.read(),
        )


async def answers(session: aiohttp.ClientSession, cases: Iterable[Case]) -> dict[str, Shape]:
    """What a server answers to each case, by name."""
    return {case["name"]: describe(await send(session, case)) for case in cases}


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


async def load(session: aiohttp.ClientSession) -> dict[str, int]:
    """The load that the server reports."""
    async with session.get("/v1/loads") as answer:
        (found,) = (await answer.json())["loads"]
    return dict(found)


def requests(load: Mapping[str, int]) -> int:
    """The number of running and waiting requests in a load."""
    return load["num_running_reqs"] + load["num_waiting_reqs"]


async def running(session: aiohttp.ClientSession) -> int:
    """The number of running and waiting requests that the server reports."""
    return requests(await load(session))


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
