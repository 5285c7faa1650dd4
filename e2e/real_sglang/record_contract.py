"""record_contract.py GREEDY_URL STANDALONE_URL NARROW_URL: repeat the recordings of three real servers.

    .venv/bin/python -m e2e.real_sglang.record_contract http://127.0.0.1:{31001,31002,31003}

The servers must be idle and started by ./launch-server with `--served-model-name Qwen/Qwen2.5-7B-Instruct`; the third
is greedy, and has `--max-running-requests 1 --max-queued-requests 1` as well.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from dps_testkit.engine_contract.exchange import (
    Case,
    after_leaving,
    answers,
    exposition,
    recorded,
    send,
    write,
)
from dps_testkit.engine_contract.observe import metrics
from dps_testkit.engine_contract.refusals import refusals

STREAMS = Path(__file__).parents[2] / "tests/gateway/fixtures/streams_sglang_0_5_23.json"
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses"}
"""The endpoints of recorded streams, by the beginning of their names; others are of chats."""


async def repeated(session: aiohttp.ClientSession, cases: list[Case]) -> list[Case]:
    """The cases with the server's answers, starting with an empty prefix cache."""
    await send(session, {"method": "POST", "path": "/flush_cache"})
    found = await answers(session, cases)
    return [{**case, "answer": found[case["name"]]} for case in cases]


async def streams(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """The exact text of the answer to each recorded stream's request."""
    entries = []
    for entry in json.loads(STREAMS.read_text()):
        path = PATHS.get(entry["name"].partition(":")[0], "/v1/chat/completions")
        answer = await send(session, {"method": "POST", "path": path, "body": entry["request"]})
        entries.append(entry | {"body": answer.body.decode()})
    return entries


async def main(greedy_url: str, speculative_url: str, narrow_url: str) -> None:
    """Record the servers and write the test fixtures."""
    contract = recorded()
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(greedy_url, timeout=timeout) as greedy,
        aiohttp.ClientSession(speculative_url, timeout=timeout) as speculative,
        aiohttp.ClientSession(narrow_url, timeout=timeout) as narrow,
    ):
        contract |= {
            "greedy": await repeated(greedy, contract["greedy"]),
            "speculative": await repeated(speculative, contract["speculative"]),
            "refusals": [
                {"name": name, "answer": answer} for name, answer in (await refusals(narrow)).items()
            ],
            "client left a stream": await after_leaving(greedy, stream=True),
            "client left an answer": await after_leaving(greedy, stream=False),
            "metrics": metrics(await exposition(greedy)),
            "speculative metrics": metrics(await exposition(speculative)),
        }
        write(contract)
        STREAMS.write_text(json.dumps(await streams(greedy), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
