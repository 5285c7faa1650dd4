"""Sessions that change pools on every turn, and tenants, on real SGLang servers that share a prefix cache.

The sessions have the answers of a single greedy server, and almost all of the cached tokens of sessions that never
moved. No tenant reads what another's requests cached.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from dps_testkit.processes import Engine, Gateway, LocalProcesses
from e2e.prefix_cache.alternation import KINDS, LONG, SHORT, check, gateway, sessions
from e2e.prefix_cache.sessions import Session, play, stored_tokens, until_stored
from e2e.prefix_cache.shared_servers import shared_servers
from e2e.prefix_cache.tenants import (
    ENDPOINTS,
    TEMPLATE_TOKENS,
    WORDS,
    cached_tokens,
    tenants_gateway,
)
from e2e.real_sglang.local_sglang import tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

GENERATED_TOKENS = 48
ALGORITHMS = ("STANDALONE", "NGRAM")
PAGE_TOKENS = (64, 1)


@dataclass(frozen=True)
class Shared:
    """Running servers with a common prefix cache by kind, and sessions that never moved.

    gateways: by algorithm, each in front of the greedy server and the server with the algorithm.
    """

    page_tokens: int
    servers: Mapping[str, Engine]
    gateways: Mapping[str, Gateway]
    tenants: Mapping[str, Gateway]
    """By kind of server, a gateway with API keys in front of that server alone."""
    unmoved: list[Session]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PAGE_TOKENS)
async def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Shared]:
    page_tokens: int = request.param
    folder = tmp_path_factory.mktemp("shared")
    async with (
        shared_servers(folder, page_tokens) as servers,
        LocalProcesses(folder, tiny_model()) as processes,
    ):
        greedy = servers["greedy"]
        gateways = {
            algorithm: await gateway(processes, servers[algorithm], greedy) for algorithm in ALGORITHMS
        }
        tenants = {
            kind: await tenants_gateway(processes, folder, servers[kind]) for kind in ("greedy", "STANDALONE")
        }
        unmoved = sessions("unmoved")
        await play(unmoved, greedy.url, {"": greedy.url}, page_tokens)
        yield Shared(page_tokens, servers, gateways, tenants, unmoved)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_alternating_sessions_equal_sessions_that_never_moved(shared: Shared, algorithm: str) -> None:
    moved = sessions(algorithm)
    engines = {"greedy": shared.servers["greedy"].url, "speculative": shared.servers[algorithm].url}
    await play(moved, shared.gateways[algorithm].url, engines, shared.page_tokens)

    check(moved, shared.unmoved, shared.page_tokens)


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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_acceptance_after_a_fetch_equals_that_of_a_cold_server(shared: Shared, algorithm: str) -> None:
    """With STANDALONE, the draft model has prefilled the prefix that the greedy server wrote, so it predicts as usual.

    NGRAM drafts from all text that the server has generated, so it generates each answer once before the comparison.
    """
    greedy, reader, router = shared.servers["greedy"], shared.servers[algorithm], shared.gateways[algorithm]
    random_ids = random.Random(f"{algorithm} {shared.page_tokens}")
    prompts = [random_ids.choices(range(100, 100_000), k=LONG) for _ in range(len(KINDS))]
    stored = LONG // shared.page_tokens * shared.page_tokens
    before = await stored_tokens(greedy.url)
    fetched_name, cold_name, learned_name = (f"{name} {algorithm}" for name in ("fetched", "cold", "learned"))
    first = await generate(router.url, prompts, 1, fetched_name)
    await until_stored(greedy.url, before + len(KINDS) * stored)
    prompts = [
        prompt + answer["output_ids"] + random_ids.choices(range(100, 100_000), k=SHORT)
        for prompt, answer in zip(prompts, first, strict=True)
    ]
    if algorithm == "NGRAM":
        await generate(reader.url, prompts, GENERATED_TOKENS, learned_name)
    fetched = await generate(router.url, prompts, GENERATED_TOKENS, fetched_name)
    cold = await generate(reader.url, prompts, GENERATED_TOKENS, cold_name)

    assert [answer["meta_info"]["cached_tokens"] for answer in cold] == [0] * len(KINDS)
    assert [answer["meta_info"]["cached_tokens"] for answer in fetched] == [stored] * len(KINDS)
    assert [accepted(answer) for answer in fetched] == [accepted(answer) for answer in cold]
    assert sum(verifications for _, verifications in map(accepted, cold)) < len(KINDS) * GENERATED_TOKENS


def accepted(answer: dict[str, Any]) -> tuple[list[int], int]:
    """The tokens of an answer, and in how many verification steps they were accepted."""
    return answer["output_ids"], answer["meta_info"]["spec_verify_ct"]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_tenants_do_not_read_each_others_tokens_from_memory_or_storage(
    shared: Shared, path: str
) -> None:
    """The greedy server has a tenant's prompt in memory and in the storage, from which the other server reads."""
    greedy, reader = shared.tenants["greedy"], shared.tenants["STANDALONE"]
    before = await stored_tokens(shared.servers["greedy"].url)
    assert await cached_tokens(greedy, path, "alpha") < TEMPLATE_TOKENS
    await until_stored(shared.servers["greedy"].url, before + WORDS)

    assert await cached_tokens(greedy, path, "beta") < TEMPLATE_TOKENS
    assert await cached_tokens(reader, path, "gamma") < TEMPLATE_TOKENS
    assert await cached_tokens(reader, path, "alpha") >= WORDS
    assert await cached_tokens(greedy, path, "alpha") >= WORDS
