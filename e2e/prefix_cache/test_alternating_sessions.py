"""Sessions that change pools on every turn, and tenants, on a greedy and a STANDALONE server that share a prefix cache.

The sessions have the answers of a single greedy server, and almost all of the cached tokens of sessions that never
moved. No tenant reads what another's requests cached. Each server splits the model between two processes, which store
their own pages, prefills prompts in chunks, and uses the overlap schedule. Servers of one process without this
schedule and NGRAM are tested in test_mooncake.py.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_operator.cache_health import EngineSample, engine_sample
from dps_sglang.metrics import REFILLS
from dps_sglang.sharing import REPLACED
from dps_testkit.engine_contract import storage as contract
from dps_testkit.http import metric
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.waiting import wait_until
from e2e.prefix_cache import mooncake, overlap_schedule, refill_control, sglang_plugins
from e2e.prefix_cache.acceptance import Urls, after_a_fetch, check_accepted, check_fewer_accepted, leave_after
from e2e.prefix_cache.alternation import (
    SHORT,
    answers,
    cached_at_first,
    check,
    check_answers,
    fewer_sessions,
    gateway,
    pools,
    sessions,
)
from e2e.prefix_cache.contract import check_recorded
from e2e.prefix_cache.mooncake import Master
from e2e.prefix_cache.sessions import Session, play
from e2e.prefix_cache.shared_servers import shared_servers
from e2e.prefix_cache.tenants import ENDPOINTS, check_separated, tenants_gateway
from e2e.real_sglang.local_sglang import tiny_model

pytestmark = mooncake.MARKS

KINDS = ("greedy", "STANDALONE")
ABORTED_AFTER_SECONDS = (0.05, 0.1, 0.2, 0.4)
RANKS = 2
CHUNK_TOKENS = 256
"""Tokens that are prefilled at once, fewer than a LONG or SHORT turn adds."""
OPTIONS = ("--tp-size", str(RANKS), "--chunked-prefill-size", str(CHUNK_TOKENS))
ENVIRONMENT = {
    # By default, SGLang distributes the processes over NUMA nodes, of which a small machine has only one.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    # If SGLang finds NCCL, it expects a GPU.
    "SGLANG_NCCL_SO_PATH": "/does-not-exist",
    # The longest time after which a server notices that a client that waits for a whole answer has left.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
}


@dataclass(frozen=True)
class Shared:
    """Running servers with a common prefix cache by kind, and sessions that never moved.

    gateway: in front of both servers. refills: the folder with requests to `refill_control`.
    """

    master: Master
    refills: Path
    servers: Mapping[str, Engine]
    gateway: Gateway
    tenants: Mapping[str, Gateway]
    """By kind of server, a gateway with API keys in front of that server alone."""
    unmoved: list[Session]

    @property
    def urls(self) -> Urls:
        """The base URLs of the gateway and of the servers."""
        return Urls(self.gateway.url, self.servers["greedy"].url, self.servers["STANDALONE"].url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    mooncake.install()
    folder = tmp_path_factory.mktemp("shared")
    plugins, refills = folder / "plugins", folder / "refills"
    sglang_plugins.install(plugins, overlap_schedule, refill_control)
    refills.mkdir()
    environment = {
        **ENVIRONMENT,
        **mooncake.ENVIRONMENT,
        "PYTHONPATH": f"{plugins}:{mooncake.PACKAGE}",
        refill_control.VARIABLE: str(refills),
    }
    async with (
        mooncake.mooncake_master(folder) as master,
        shared_servers(
            folder,
            kinds=KINDS,
            cache=master.cache,
            environment=environment,
            options=OPTIONS,
            omitted=[overlap_schedule.DISABLE],
        ) as servers,
        LocalProcesses(folder, tiny_model()) as processes,
    ):
        greedy = servers["greedy"]
        both = await gateway(processes, servers["STANDALONE"], greedy)
        tenants = {kind: await tenants_gateway(processes, folder, servers[kind]) for kind in KINDS}
        unmoved = sessions("unmoved")
        await play(unmoved, greedy.url, {"": greedy.url})
        yield Shared(master, refills, servers, both, tenants, unmoved)


@pytest.mark.parametrize("kind", KINDS)
async def test_server_uses_the_overlap_schedule(shared: Shared, kind: str) -> None:
    """Otherwise, the other tests would not cover it."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.get(f"{shared.servers[kind].url}/server_info") as answer,
    ):
        assert not (await answer.json())["disable_overlap_schedule"]


async def test_alternating_sessions_equal_sessions_that_never_moved(shared: Shared) -> None:
    moved = sessions("moved")
    engines = {"greedy": shared.servers["greedy"].url, "speculative": shared.servers["STANDALONE"].url}
    await play(moved, shared.gateway.url, engines)

    check(moved, shared.unmoved)


async def test_acceptance_after_a_fetch_equals_that_of_a_cold_server(shared: Shared) -> None:
    """The draft model has prefilled the prefix that was fetched, so it predicts as usual."""
    fetched, cold = await after_a_fetch(shared.urls, "STANDALONE", PAGE_TOKENS)

    check_accepted(fetched, cold, PAGE_TOKENS)


async def test_acceptance_after_aborted_requests_equals_that_of_a_cold_server(shared: Shared) -> None:
    """Clients leave at various times after they have sent the prompts."""
    before = await metric(shared.urls.speculative, "sglang:num_aborted_requests_total")
    leaving = [leave_after(seconds) for seconds in ABORTED_AFTER_SECONDS]
    fetched, cold = await after_a_fetch(shared.urls, "STANDALONE", PAGE_TOKENS, "aborted", leaving)

    check_accepted(fetched, cold, PAGE_TOKENS, more_cached=True)
    assert await metric(shared.urls.speculative, "sglang:num_aborted_requests_total") > before


async def test_acceptance_after_a_request_was_aborted_during_its_refill_equals_that_of_a_cold_server(
    shared: Shared,
) -> None:
    """All processes halt between two chunks of the refill until the engine has received the abort."""

    async def refills(outcome: str) -> float:
        return await metric(shared.urls.speculative, f"{REFILLS}_total", outcome=outcome)

    aborted: list[str] = []

    async def leave(answers: Awaitable[object]) -> None:
        before = await refills("completed")
        aborted.extend(await refill_control.leave_during_a_refill(shared.refills, answers))

        async def completed() -> bool:
            return await refills("completed") >= before + RANKS * len(aborted)

        await wait_until(completed, "the refills of the aborted requests have ended")

    fetched, cold = await after_a_fetch(shared.urls, "STANDALONE", PAGE_TOKENS, "refill", [leave])

    assert aborted
    assert await refills("failed") == 0
    check_accepted(fetched, cold, PAGE_TOKENS, more_cached=True)


async def test_acceptance_falls_if_the_draft_model_does_not_prefill_what_was_fetched(shared: Shared) -> None:
    """The control of the previous tests. The answers are the same, because the target model verifies every draft."""
    with refill_control.requested(shared.refills, refill_control.SKIP):
        fetched, cold = await after_a_fetch(shared.urls, "STANDALONE", PAGE_TOKENS, "without refill")

    check_fewer_accepted(fetched, cold, PAGE_TOKENS)


async def test_aborted_requests_change_no_answer(shared: Shared) -> None:
    """Clients leave at various times after they have sent a request whose prefix the STANDALONE server fetches."""
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


async def test_pages_that_only_one_process_of_a_server_has_change_no_answer(shared: Shared) -> None:
    """Before every turn, one process loses its pages, so that it could fetch less than the other one."""
    moved = fewer_sessions("one rank")
    tags = sorted(pages for pages, _ in (await sample(shared.urls.greedy)).sharing)
    assert len(tags) == RANKS
    async with AsyncOpenAI(base_url=f"{shared.gateway.url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(len(moved[0].lengths)):
            await mooncake.remove_pages(shared.master, tags[turn % RANKS])
            await asyncio.gather(*(session.ask(client) for session in moved))
    check_answers(moved, shared.unmoved)


async def test_operator_understands_what_the_engines_report(shared: Shared) -> None:
    found = [await sample(server.url) for server in shared.servers.values()]
    for each in found:
        assert len(each.sharing) == RANKS
        assert {problem for _, problem in each.sharing} == {""}
        assert {name for name, value in each.counters.items() if value > 0} >= {
            *("read", "stored", "bandwidth", "fetches", "prefilled", "prefill_seconds")
        }
        assert each.kv_gigabytes_per_token > 0
    assert found[0].sharing == found[1].sharing


async def sample(url: str) -> EngineSample:
    """What the operator reads of an engine's metrics."""
    async with aiohttp.ClientSession(raise_for_status=True) as http, http.get(f"{url}/metrics") as answer:
        return engine_sample(await answer.text())


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_tenants_do_not_read_each_others_tokens_from_memory_or_storage(
    shared: Shared, path: str
) -> None:
    writer, reader = shared.tenants["greedy"], shared.tenants["STANDALONE"]
    await check_separated(path, writer, reader, shared.servers["greedy"])


async def test_servers_find_of_each_prompt_what_was_recorded(shared: Shared) -> None:
    """The recording is the contract of the emulated engine."""
    urls = {contract.GREEDY: shared.urls.greedy, contract.SPECULATIVE: shared.urls.speculative}
    await check_recorded(urls, "STANDALONE")


async def test_server_whose_weights_are_replaced_shares_no_pages_any_more(shared: Shared) -> None:
    """The names of pages would identify the earlier weights. Later tests cannot share pages with it."""
    replaced, other = shared.servers["greedy"], shared.servers["STANDALONE"]
    written = fewer_sessions("before")
    await play(written, other.url, {"": other.url})
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(
            f"{replaced.url}/update_weights_from_disk", json={"model_path": str(tiny_model(seed=1))}
        ) as answer,
    ):
        assert (await answer.json())["success"]

    same_prompts, new_prompts = fewer_sessions("before"), fewer_sessions("after")
    for played in (same_prompts, new_prompts):
        await play(played, replaced.url, {})
    assert cached_at_first(same_prompts) == 0
    assert answers(same_prompts) == answers(new_prompts)

    read = fewer_sessions("after")
    await play(read, other.url, {})
    assert cached_at_first(read) == 0
    check_answers(read, shared.unmoved)
    assert answers(read) != answers(new_prompts)


async def test_server_whose_weights_are_reset_shares_no_pages_any_more(shared: Shared) -> None:
    """The last test. An endpoint that compares weights can also replace them by random numbers."""
    url = shared.servers["STANDALONE"].url
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{url}/weights_checker", json={"action": "reset_tensors"}) as answer,
    ):
        assert (await answer.json())["success"]

    assert (await sample(url)).sharing == {("", REPLACED)}
