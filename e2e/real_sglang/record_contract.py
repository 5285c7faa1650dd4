"""record.py GREEDY_URL STANDALONE_URL: writes the contract and the stream fixtures from two real servers.

    .venv/bin/python -m e2e.real_sglang.record_contract http://127.0.0.1:31001 http://127.0.0.1:31002

The servers are those of ./launch, idle, and started with ``--served-model-name Qwen/Qwen2.5-7B-Instruct``.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp

from dps_testkit.engine_contract.cases import GREEDY, SPECULATIVE, Case, chat
from dps_testkit.engine_contract.exchange import after_leaving, exposition, send
from dps_testkit.engine_contract.observe import Shape, describe, metrics

TESTS = Path(__file__).parents[2] / "tests"
VERSION = "0.5.23"
STREAMED = [{"role": "user", "content": "A stream"}]


async def answers(session: aiohttp.ClientSession, cases: Iterable[Case]) -> dict[str, Shape]:
    """What the server answers to each case, from an empty prefix cache; by the cases' names."""
    await send(session, Case("empty the cache", "POST", "/flush_cache"))
    return {case.name: describe(await send(session, case)) for case in cases}


async def contract(greedy: aiohttp.ClientSession, speculative: aiohttp.ClientSession) -> dict[str, Shape]:
    """All that is recorded of the two servers."""
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
    """One answer streamed without, with and with continuous usage: the exact bytes of each, as text."""
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
    return recorded


async def main(greedy_url: str, speculative_url: str) -> None:
    """Record both servers and write the files that the tests read."""
    patience = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(greedy_url, timeout=patience) as greedy,
        aiohttp.ClientSession(speculative_url, timeout=patience) as speculative,
    ):
        write(TESTS / f"local/contract/sglang-{VERSION}.json", await contract(greedy, speculative))
        name = VERSION.replace(".", "_")
        write(TESTS / f"gateway/fixtures/streams_sglang_{name}.json", await streams(greedy))


def write(path: Path, content: Any) -> None:
    """Write JSON that a person can review as a difference."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
