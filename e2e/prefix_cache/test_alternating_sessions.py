"""Sessions that change pools on every turn, and tenants, on real SGLang servers that share a prefix cache.

The sessions have the answers of a single greedy server, and almost all of the cached tokens of sessions that never
moved. No tenant reads what another's requests cached.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from dps_testkit.processes import Engine, Gateway, LocalProcesses
from e2e.prefix_cache.acceptance import Urls, after_a_fetch, check_accepted
from e2e.prefix_cache.alternation import (
    SHORT,
    check,
    check_answers,
    fewer_sessions,
    gateway,
    pools,
    sessions,
)
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

ALGORITHMS = ("STANDALONE", "NGRAM")
PAGE_TOKENS = (64, 1)
ABORTED_AFTER_SECONDS = (0.05, 0.1, 0.2, 0.4)


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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_acceptance_after_a_fetch_equals_that_of_a_cold_server(shared: Shared, algorithm: str) -> None:
    """With STANDALONE, the draft model has prefilled the prefix that was fetched, so it predicts as usual."""
    urls = Urls(shared.gateways[algorithm].url, shared.servers["greedy"].url, shared.servers[algorithm].url)
    fetched, cold = await after_a_fetch(urls, algorithm, shared.page_tokens)

    check_accepted(fetched, cold, shared.page_tokens)


async def test_aborted_requests_change_no_answer(shared: Shared) -> None:
    """Clients leave while the STANDALONE server fetches their prefix, and while its draft model prefills it."""
    moved = fewer_sessions("aborted")
    url = f"{shared.gateways['STANDALONE'].url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for turn in range(len(moved[0].lengths)):
            fetching = [session for session in moved if turn > 0 and session.lengths[turn] == SHORT]
            for seconds in ABORTED_AFTER_SECONDS:
                await asyncio.gather(*(session.abandon(client, seconds) for session in fetching))
            await asyncio.gather(*(session.ask(client) for session in moved))

    assert pools(moved) == [
        ["speculative" if words == SHORT else "greedy" for words in session.lengths] for session in moved
    ]
    check_answers(moved, shared.unmoved)


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
