"""Sessions that change pools on every turn, and tenants, on a greedy and a STANDALONE server that share a prefix cache.

The sessions have the answers of a single greedy server, and almost all of the cached tokens of sessions that never
moved. No tenant reads what another's requests cached. Other algorithms and page sizes are tested in pods, in
e2e/node/test_sglang_pairs.py.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
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

KINDS = ("greedy", "STANDALONE")
ABORTED_AFTER_SECONDS = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Shared:
    """Running servers with a common prefix cache by kind, and sessions that never moved.

    gateway: in front of both servers.
    """

    servers: Mapping[str, Engine]
    gateway: Gateway
    tenants: Mapping[str, Gateway]
    """By kind of server, a gateway with API keys in front of that server alone."""
    unmoved: list[Session]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    async with (
        shared_servers(folder, kinds=KINDS) as servers,
        LocalProcesses(folder, tiny_model()) as processes,
    ):
        greedy = servers["greedy"]
        both = await gateway(processes, servers["STANDALONE"], greedy)
        tenants = {kind: await tenants_gateway(processes, folder, servers[kind]) for kind in KINDS}
        unmoved = sessions("unmoved")
        await play(unmoved, greedy.url, {"": greedy.url})
        yield Shared(servers, both, tenants, unmoved)


async def test_alternating_sessions_equal_sessions_that_never_moved(shared: Shared) -> None:
    moved = sessions("moved")
    engines = {"greedy": shared.servers["greedy"].url, "speculative": shared.servers["STANDALONE"].url}
    await play(moved, shared.gateway.url, engines)

    check(moved, shared.unmoved)


async def test_acceptance_after_a_fetch_equals_that_of_a_cold_server(shared: Shared) -> None:
    """The draft model has prefilled the prefix that was fetched, so it predicts as usual."""
    urls = Urls(shared.gateway.url, shared.servers["greedy"].url, shared.servers["STANDALONE"].url)
    fetched, cold = await after_a_fetch(urls, "STANDALONE", PAGE_TOKENS)

    check_accepted(fetched, cold, PAGE_TOKENS)


async def test_aborted_requests_change_no_answer(shared: Shared) -> None:
    """Clients leave while the STANDALONE server fetches their prefix, and while its draft model prefills it."""
    moved = fewer_sessions("aborted")
    url = f"{shared.gateway.url}/v1"
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
