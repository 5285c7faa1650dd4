"""record_contract.py GREEDY_URL STANDALONE_URL: record the contract and the stream fixtures from two real servers.

    .venv/bin/python -m e2e.real_sglang.record_contract http://127.0.0.1:31001 http://127.0.0.1:31002

The servers must be idle and started by ./launch-server with `--served-model-name Qwen/Qwen2.5-7B-Instruct`.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp

from dps_testkit.engine_contract.cases import GREEDY, SPECULATIVE, Case, chat, messages, responses
from dps_testkit.engine_contract.exchange import after_leaving, exposition, send
from dps_testkit.engine_contract.observe import Shape, describe, metrics

TESTS = Path(__file__).parents[2] / "tests"
VERSION = "0.5.23"
STREAMED = [{"role": "user", "content": "A stream"}]


async def answers(session: aiohttp.ClientSession, cases: Iterable[Case]) -> dict[str, Shape]:
    """The server's answers by case name, starting with an empty prefix cache."""
    await send(session, Case("empty the cache", "POST", "/flush_cache"))
    return {case.name: describe(await send(session, case)) for case in cases}


async def contract(greedy: aiohttp.ClientSession, speculative: aiohttp.ClientSession) -> dict[str, Shape]:
    """The contract, as recorded from both servers."""
    return {
        "engine": f"sglang {VERSION}",
        "greedy": await answers(greedy, GREEDY),
        "speculative": await answers(speculative, SPECULATIVE),
        "client left a stream": await after_leaving(greedy, stream=True),
        "client left an answer": await after_leaving(greedy, stream=False),
        "metrics": metrics(await exposition(greedy)),
        "speculative metrics": metrics(await exposition(speculative)),
    }


async def streams(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """The exact text of a stream without usage, with usage and with continuous usage, and of the other APIs."""
    options: dict[str, Any] = {
        "plain": {},
        "include_usage": {"stream_options": {"include_usage": True}},
        "continuous_usage_stats": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    }
    recorded = []
    for name, fields in options.items():
        case = chat(name, messages=STREAMED, stream=True, **fields)
        answer = await send(session, case)
        recorded.append({"name": name, "request": case.body, "body": answer.body.decode()})
    for case in (
        messages("stream", messages=STREAMED, stream=True),
        responses("stream", input=STREAMED, stream=True),
    ):
        answer = await send(session, case)
        recorded.append({"name": case.name, "request": case.body, "body": answer.body.decode()})
    return recorded


async def main(greedy_url: str, speculative_url: str) -> None:
    """Record both servers and write the test fixtures."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(greedy_url, timeout=timeout) as greedy,
        aiohttp.ClientSession(speculative_url, timeout=timeout) as speculative,
    ):
        write(TESTS / f"local/contract/sglang-{VERSION}.json", await contract(greedy, speculative))
        name = VERSION.replace(".", "_")
        write(TESTS / f"gateway/fixtures/streams_sglang_{name}.json", await streams(greedy))


def write(path: Path, content: Any) -> None:
    """Write indented JSON, so that differences can be reviewed."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
