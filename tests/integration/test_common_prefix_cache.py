"""A gateway whose engines share a prefix cache: the sources of each prompt's tokens, what clients see of them, and
failures of the storage.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dps_testkit.data_plane import CHAT, chat, common_cache, read
from dps_testkit.http import metric
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from tests.integration.leftovers import decisions, entries_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Sharing:
    """A gateway and the engine of each pool."""

    gateway: Gateway
    engines: Mapping[str, Engine]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sharing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sharing]:
    folder = tmp_path_factory.mktemp("common")
    flags = [*common_cache(folder), "--page-size", str(PAGE_TOKENS), "--emulate-speed", "200"]
    async with LocalProcesses(folder) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy", arguments=flags)
        routing = {"commonPrefixCache": True, "decisionLog": str(folder / "decisions.jsonl")}
        gateway = await processes.start_gateway([speculative], [greedy], {"routing": routing})
        yield Sharing(gateway, {"speculative": speculative, "greedy": greedy})


@pytest.fixture
def gateway(sharing: Sharing) -> Gateway:
    return sharing.gateway


async def tokens_by_source(gateway: Gateway, pool: str) -> dict[str, float]:
    """The prompt tokens of a pool."""
    return {
        source: await gateway.metric("dps_prompt_tokens_by_source_total", pool=pool, source=source)
        for source in ("held", "fetched", "computed")
    }


def prompt(name: str, words: int) -> dict[str, Any]:
    return chat(2) | {"messages": [{"role": "user", "content": f"{name} " + "sky " * words}]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_tokens_fetched_from_the_other_pool_are_counted_and_hidden_from_the_client(
    gateway: Gateway, stream: bool
) -> None:
    """A first turn over the threshold goes to the greedy pool, and the same prompt again to the speculative one."""
    body = prompt(f"stream {stream}", 1000) | {"stream": stream}
    log = Path((await gateway.document("/config"))["routing"]["decisionLog"])
    known, before = len(entries_of(log)), await tokens_by_source(gateway, "speculative")
    answers = [await read(gateway.url + CHAT, body) for _ in range(2)]
    assert not any(b"sglext" in answer for answer in answers)
    first, second = (await decisions(log, known + 2))[known:]
    assert (first["pool"], first["fetched_tokens"]) == ("greedy", 0)
    pages = (second["prompt_tokens"] - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert (second["pool"], second["cached_tokens"]) == ("speculative", pages)
    assert second["fetched_tokens"] == pages
    after = await tokens_by_source(gateway, "speculative")
    assert {source: after[source] - before[source] for source in after} == {
        "held": 0,
        "fetched": pages,
        "computed": second["prompt_tokens"] - pages,
    }
    assert second["fetchable_tokens"] == {"speculative": pages, "greedy": 0}
    # By record, the other pool has the whole prompt, of which whole pages are cached.
    fetchable = await gateway.metric("dps_fetchable_tokens_total", pool="speculative")
    assert fetchable == (1 + stream) * pages


@pytest.mark.parametrize(
    ("pool", "failure"),
    [
        ("greedy", "write_error"),
        ("greedy", "full"),
        ("speculative", "read_error"),
        ("speculative", None),
    ],
    ids=["write error", "full", "read error", "slow"],
)
async def test_failures_of_the_storage_cause_prefills_instead_of_failed_requests(
    sharing: Sharing, pool: str, failure: str | None
) -> None:
    """The greedy engine writes a prompt's pages, and the speculative one reads them. One of them has the fault.

    If the storage is slow, the pages arrive after the time limit of the engine's prefetch policy.
    """
    gateway, engine = sharing.gateway, sharing.engines[pool]
    before = await tokens_by_source(gateway, "speculative")
    failed = await metric(engine.url, "dps_prefix_cache_pages_total", outcome=failure or "read")
    await engine.emulate(
        storage_failure=failure, **({} if failure else {"storage_tokens_per_second": PAGE_TOKENS * 5})
    )
    try:
        answers = [await read(gateway.url + CHAT, prompt(f"failing {failure}", 1000)) for _ in range(2)]
    finally:
        await engine.emulate()

    usage = [json.loads(answer)["usage"] for answer in answers]
    assert [each["completion_tokens"] for each in usage] == [2, 2]
    prompt_tokens = usage[0]["prompt_tokens"]
    after = await tokens_by_source(gateway, "speculative")
    new = {source: after[source] - before[source] for source in after}
    assert new == {"held": 0, "fetched": 0, "computed": prompt_tokens}
    counted = await metric(engine.url, "dps_prefix_cache_pages_total", outcome=failure or "read")
    assert counted - failed == prompt_tokens // PAGE_TOKENS
