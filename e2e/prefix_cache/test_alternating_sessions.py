"""Sessions that change pools on every turn, on real SGLang servers that share a prefix cache.

They have the answers of a single greedy server, and almost all of the cached tokens of sessions that never moved.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from dps_engines.pools import PoolName
from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_testkit.processes import Engine, Gateway, Site
from e2e.prefix_cache.sessions import Session, play, stored_tokens, until_stored
from e2e.prefix_cache.shared_servers import FETCH_THRESHOLD, shared_servers
from e2e.real_sglang.local_sglang import tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

THRESHOLD_TOKENS = 400
LONG, SHORT, SHORTER = 450, 300, 150
"""Words of a question, which has about as many tokens. Longer ones than the threshold go to the greedy pool. What the
other pool added in a SHORT turn exceeds SGLang's threshold for fetches, what it added in a SHORTER turn does not."""
GENERATED_TOKENS = 48
KINDS = list(product((False, True), (SHORT, SHORTER), (True, False)))
"""Each session of a test: whether it is streamed, its shorter questions, and whether it begins in the greedy pool."""


@dataclass(frozen=True)
class Shared:
    """Running servers with a common prefix cache by pool, their gateway, and sessions that never moved."""

    servers: Mapping[PoolName, Engine]
    gateway: Gateway
    unmoved: list[Session]


def sessions(salt: str) -> list[Session]:
    """Concurrent sessions, one of each kind."""
    return [
        Session(number, salt, stream, [LONG, short, LONG] if greedy_first else [short, LONG, short])
        for number, (stream, short, greedy_first) in enumerate(KINDS)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    routing = {"thresholdTokens": THRESHOLD_TOKENS, "commonPrefixCache": True}
    async with shared_servers(folder) as servers, Site(folder, tiny_model()) as site:
        gateway = await site.gateway([servers["speculative"]], [servers["greedy"]], {"routing": routing})
        unmoved, greedy = sessions("unmoved"), servers["greedy"]
        await play(unmoved, f"{greedy.url}/v1", {"": greedy})
        yield Shared(servers, gateway, unmoved)


async def test_alternating_sessions_equal_sessions_that_never_moved(shared: Shared) -> None:
    moved = sessions("moved")
    await play(
        moved, f"{shared.gateway.url}/v1", {str(pool): engine for pool, engine in shared.servers.items()}
    )

    assert [[turn.pool for turn in session.turns] for session in moved] == [
        ["greedy" if words == LONG else "speculative" for words in session.lengths] for session in moved
    ]
    assert [[(turn.text, turn.prompt_tokens) for turn in session.turns] for session in moved] == [
        [(turn.text, turn.prompt_tokens) for turn in session.turns] for session in shared.unmoved
    ]
    not_cached = [
        [
            turn.cached_tokens - other.cached_tokens
            for other, turn in zip(session.turns, alone.turns, strict=True)
        ]
        for session, alone in zip(moved, shared.unmoved, strict=True)
    ]
    assert max(map(max, not_cached)) <= PAGE_TOKENS + FETCH_THRESHOLD, not_cached


async def generate(url: str, prompts: list[list[int]], tokens: int, name: str) -> list[dict[str, Any]]:
    """Answers of SGLang's own endpoint, which reports verification steps, to concurrent prompts of token ids.

    name: of the sessions and of the part of the cache that they use.
    """

    async def answer(http: aiohttp.ClientSession, number: int, prompt: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        key = f"{name} {number}"
        body = {"input_ids": prompt, "sampling_params": sampling, "extra_key": key}
        async with http.post(f"{url}/generate", json=body, headers={"x-session-id": key}) as response:
            answer: dict[str, Any] = await response.json()
        return answer

    async with aiohttp.ClientSession(raise_for_status=True) as http:
        return await asyncio.gather(*(answer(http, *numbered) for numbered in enumerate(prompts)))


async def test_acceptance_after_a_fetch_equals_that_of_a_cold_server(shared: Shared) -> None:
    """The draft model has prefilled the prefix that the greedy server wrote, so it predicts as well as usual."""
    greedy, standalone, gateway = shared.servers["greedy"], shared.servers["speculative"], shared.gateway
    random_ids = random.Random(0)
    prompts = [random_ids.choices(range(100, 100_000), k=LONG) for _ in range(len(KINDS))]
    before = await stored_tokens(greedy)
    first = await generate(gateway.url, prompts, 1, "fetched")
    await until_stored(greedy, before + len(KINDS) * (LONG // PAGE_TOKENS * PAGE_TOKENS))
    prompts = [
        prompt + answer["output_ids"] + random_ids.choices(range(100, 100_000), k=SHORT)
        for prompt, answer in zip(prompts, first, strict=True)
    ]
    fetched = await generate(gateway.url, prompts, GENERATED_TOKENS, "fetched")
    cold = await generate(standalone.url, prompts, GENERATED_TOKENS, "cold")

    assert [answer["meta_info"]["cached_tokens"] for answer in cold] == [0] * len(KINDS)
    assert [answer["meta_info"]["cached_tokens"] for answer in fetched] == [
        LONG // PAGE_TOKENS * PAGE_TOKENS
    ] * len(KINDS)
    assert [accepted(answer) for answer in fetched] == [accepted(answer) for answer in cold]
    assert sum(verifications for _, verifications in map(accepted, cold)) < len(KINDS) * GENERATED_TOKENS


def accepted(answer: dict[str, Any]) -> tuple[list[int], int]:
    """The tokens of an answer, and in how many verification steps they were accepted."""
    return answer["output_ids"], answer["meta_info"]["spec_verify_ct"]
