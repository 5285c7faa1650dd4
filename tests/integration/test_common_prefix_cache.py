"""A gateway whose engines share a prefix cache: the sources of each prompt's tokens, and what clients see of them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dps_testkit.data_plane import CHAT, chat, common_cache, read
from dps_testkit.processes import Gateway, LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PAGE_TOKENS = 64
ASKING = {"return_cached_tokens_details": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("common")
    flags = [*common_cache(folder), "--page-size", str(PAGE_TOKENS), "--emulate-speed", "200"]
    async with LocalProcesses(folder) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy", arguments=flags)
        routing = {"commonPrefixCache": True, "decisionLog": str(folder / "decisions.jsonl")}
        yield await processes.start_gateway([speculative], [greedy], {"routing": routing})


def prompt(name: str, words: int) -> dict[str, Any]:
    return chat(2) | {"messages": [{"role": "user", "content": f"{name} " + "sky " * words}]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_tokens_fetched_from_the_other_pool_are_counted_and_hidden_from_the_client(
    gateway: Gateway, stream: bool
) -> None:
    """A first turn over the threshold goes to the greedy pool, and the same prompt again to the speculative one."""
    body = prompt(f"stream {stream}", 1000) | {"stream": stream}
    log = Path((await gateway.document("/config"))["routing"]["decisionLog"])

    async def counted(pool: str) -> dict[str, float]:
        return {
            source: await gateway.metric("dps_prompt_tokens_by_source_total", pool=pool, source=source)
            for source in ("held", "fetched", "computed")
        }

    def entries() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    known, before = len(entries()), await counted("speculative")
    answers = [await read(gateway.url + CHAT, body) for _ in range(2)]
    assert not any(b"sglext" in answer for answer in answers)

    async def written() -> bool:
        return len(entries()) == known + 2

    await wait_until(written, "both turns are in the decision log")
    first, second = entries()[known:]
    assert (first["pool"], first["fetched_tokens"]) == ("greedy", 0)
    pages = (second["prompt_tokens"] - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert (second["pool"], second["cached_tokens"]) == ("speculative", pages)
    assert second["fetched_tokens"] == pages
    after = await counted("speculative")
    assert {source: after[source] - before[source] for source in after} == {
        "held": 0,
        "fetched": pages,
        "computed": second["prompt_tokens"] - pages,
    }
    assert second["fetchable_tokens"] == {"speculative": pages, "greedy": 0}
    # By record, the other pool has the whole prompt, of which whole pages are cached.
    fetchable = await gateway.metric("dps_fetchable_tokens_total", pool="speculative")
    assert fetchable == (1 + stream) * pages


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_client_that_asks_for_the_sources_receives_them(gateway: Gateway, stream: bool) -> None:
    body = prompt(f"asking {stream}", 1000) | ASKING | {"stream": stream}
    _, second = [await read(gateway.url + CHAT, body) for _ in range(2)]
    assert b'"sglext":{"cached_tokens_details":{"device":0,"host":0,"storage":' in second.replace(b": ", b":")
