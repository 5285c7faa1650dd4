"""Sessions that change pools on every turn, on real SGLang servers whose common prefix cache is Mooncake over TCP."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from dps_operator.cache_health import engine_sample
from dps_sglang.metrics import PAGES
from dps_sglang.sharing import REPLACED
from dps_testkit.engine_contract import storage as contract
from dps_testkit.http import metric
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.waiting import wait_until
from e2e.prefix_cache import mooncake
from e2e.prefix_cache.alternation import (
    answers,
    cached_at_first,
    check,
    check_answers,
    check_not_cleared,
    fewer_sessions,
    gateway,
    sessions,
)
from e2e.prefix_cache.contract import check_recorded
from e2e.prefix_cache.mooncake import Master
from e2e.prefix_cache.sessions import Session, play
from e2e.prefix_cache.shared_servers import shared_servers
from e2e.prefix_cache.tenants import check_separated, tenants_gateway
from e2e.real_sglang.local_sglang import tiny_model

pytestmark = mooncake.MARKS
ALGORITHMS = ("STANDALONE", "NGRAM")
KINDS = ("greedy", *ALGORITHMS)
NOT_SHARED = {("", REPLACED)}
FAULT_SECONDS = 0.3
"""After this time the requests of a turn are being served."""


@dataclass(frozen=True)
class Shared:
    """Running servers by kind, gateways in front of the greedy server and one with each algorithm, and the master.

    model: the link to the servers' model. tenants: by kind of server, a gateway with API keys in front of that server
    alone. unmoved: sessions that never changed pools.
    """

    master: Master
    model: Path
    servers: Mapping[str, Engine]
    gateways: Mapping[str, Gateway]
    tenants: Mapping[str, Gateway]
    unmoved: list[Session]

    async def play(self, salt: str, algorithm: str) -> list[Session]:
        """Play sessions that move on every turn; each turn begins when the pages of the previous one are stored."""
        moved = sessions(salt)
        engines = {"greedy": self.servers["greedy"].url, "speculative": self.servers[algorithm].url}
        await play(moved, self.gateways[algorithm].url, engines)
        return moved


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    mooncake.install()
    folder = tmp_path_factory.mktemp("mooncake")
    model = folder / "model"
    model.symlink_to(tiny_model())
    async with (
        mooncake.mooncake_master(folder) as master,
        shared_servers(folder, cache=master.cache, environment=mooncake.ENVIRONMENT, model=model) as servers,
        LocalProcesses(folder, tiny_model()) as processes,
    ):
        greedy = servers["greedy"]
        gateways = {
            algorithm: await gateway(processes, servers[algorithm], greedy) for algorithm in ALGORITHMS
        }
        tenants = {
            kind: await tenants_gateway(processes, folder, servers[kind]) for kind in ("greedy", "NGRAM")
        }
        unmoved = sessions("unmoved")
        await play(unmoved, greedy.url, {"": greedy.url})
        yield Shared(master, model, servers, gateways, tenants, unmoved)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_alternating_sessions_equal_sessions_that_never_moved(shared: Shared, algorithm: str) -> None:
    check(await shared.play(algorithm, algorithm), shared.unmoved)


@pytest.mark.parametrize(("writer", "reader"), [ALGORITHMS, ALGORITHMS[::-1]])
async def test_servers_that_speculate_read_each_others_pages(
    shared: Shared, writer: str, reader: str
) -> None:
    written, read = (fewer_sessions(f"written by {writer}") for _ in range(2))
    url = shared.servers[writer].url
    await play(written, url, {"": url})
    await play(read, shared.servers[reader].url, {})

    assert cached_at_first(read) > 0
    check_answers(written + read, shared.unmoved)


async def test_servers_find_of_each_prompt_what_was_recorded(shared: Shared) -> None:
    """The recording is the contract of the emulated engine."""
    urls = {
        contract.GREEDY: shared.servers["greedy"].url,
        contract.SPECULATIVE: shared.servers["NGRAM"].url,
    }
    await check_recorded(urls, "NGRAM")


@pytest_asyncio.fixture(loop_scope="module")
async def replaced(shared: Shared, tmp_path: Path) -> AsyncIterator[Engine]:
    """A greedy server that was started after the weights in the model's folder had been replaced.

    Its command line is the greedy server's, so the tag that the operator derives for the names of pages is the same.
    """
    environment, cache = mooncake.ENVIRONMENT, shared.master.cache
    link(shared.model, tiny_model(seed=1))
    try:
        async with shared_servers(
            tmp_path, kinds=("greedy",), cache=cache, environment=environment, model=shared.model
        ) as servers:
            yield servers["greedy"]
    finally:
        link(shared.model, tiny_model())


def link(path: Path, target: Path) -> None:
    """Replace a symbolic link."""
    path.unlink()
    path.symlink_to(target)


async def test_servers_with_other_weights_read_none_of_each_others_pages(
    shared: Shared, replaced: Engine
) -> None:
    """Each is asked for prompts whose pages the other one has stored with the same salt. The control can read them."""
    ours, control = shared.servers["greedy"], shared.servers["NGRAM"]
    for first, second in ((ours, replaced), (replaced, ours)):
        written, foreign = (fewer_sessions(f"first asked at {first.url}") for _ in range(2))
        await play(written, first.url, {"": first.url})
        await play(foreign, second.url, {"": second.url})

        assert cached_at_first(foreign) == 0
        assert [answer for answer in answers(foreign) if answer in answers(written)] == []
    check_answers(foreign, shared.unmoved)

    readable = fewer_sessions(f"first asked at {ours.url}")
    await play(readable, control.url, {})
    assert cached_at_first(readable) > 0
    check_answers(readable, shared.unmoved)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_tenants_do_not_read_each_others_tokens_from_memory_or_the_store(
    shared: Shared, path: str
) -> None:
    """The gateway sends the salt in a field of the one endpoint's requests, and in a header of the other's."""
    writer, reader = shared.tenants["greedy"], shared.tenants["NGRAM"]
    await check_separated(path, writer, reader, shared.servers["greedy"])


async def test_engine_does_not_clear_the_store(shared: Shared) -> None:
    """It belongs to all users of the master."""
    await check_not_cleared(shared.servers["greedy"].url, shared.servers["NGRAM"].url, shared.unmoved)


@pytest.mark.parametrize("kind", KINDS)
async def test_engines_report_the_outcomes_of_pages_and_the_bandwidth(shared: Shared, kind: str) -> None:
    """The operator understands what they report."""
    server = shared.servers[kind]
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.get(f"{server.url}/metrics") as answer,
    ):
        counters = engine_sample(await answer.text()).counters
    assert {name for name, value in counters.items() if value > 0} >= {
        *("read", "stored", "bandwidth", "fetches")
    }
    assert {"read_error", "write_error", "full"}.isdisjoint(counters)


async def test_full_store_changes_no_answer_and_is_reported(shared: Shared) -> None:
    """Mooncake finds no space for the pages of a turn, and can evict none. Afterwards, pages are shared again."""

    async def pages(outcome: str) -> float:
        return sum(
            [
                await metric(server.url, f"{PAGES}_total", outcome=outcome)
                for server in shared.servers.values()
            ]
        )

    outcomes = ("full", "write_error", "stored")
    before = [await pages(outcome) for outcome in outcomes]
    moved = sessions("full")
    async with mooncake.full_store(shared.master):
        await play(moved, shared.gateways["STANDALONE"].url, {})

        async def counted() -> bool:
            return await pages("full") > before[0]

        await wait_until(counted, "an engine has counted pages for which there was no space")
        assert [await pages(outcome) for outcome in outcomes[1:]] == before[1:]

    check_answers(moved, shared.unmoved)
    check(await shared.play("after the store was full", "STANDALONE"), shared.unmoved)


async def test_killed_client_and_restarted_master_change_no_answer(shared: Shared) -> None:
    """Both are killed while requests are served, which the engines count. Afterwards, pages are shared again."""
    moved = sessions("faulty")
    url = f"{shared.gateways['STANDALONE'].url}/v1"
    capacity = await shared.master.capacity()
    async with (
        mooncake.store_client(shared.master) as client,
        AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as http,
    ):
        for fault in (None, client.kill, shared.master.child.kill):
            turn = asyncio.gather(*(session.ask(http) for session in moved))
            await asyncio.sleep(FAULT_SECONDS)
            if fault is not None:
                fault()
            await turn

    async def failed() -> bool:
        """An attempt to reach the master may take time."""
        pages = [
            await metric(server.url, f"{PAGES}_total", outcome=outcome)
            for server in shared.servers.values()
            for outcome in ("read_error", "write_error")
        ]
        return sum(pages) > 0

    await wait_until(failed, "an engine has counted pages that it could not read or write")
    await shared.master.restart(capacity)

    check_answers(moved, shared.unmoved)
    check(await shared.play("recovered", "STANDALONE"), shared.unmoved)


async def test_server_shares_pages_after_the_memory_of_its_kv_cache_was_released(shared: Shared) -> None:
    url = shared.servers["NGRAM"].url
    shares = await sharing(url)
    for path in ("release_memory_occupation", "resume_memory_occupation"):
        await post(f"{url}/{path}", {"tags": ["kv_cache"]})

    assert await sharing(url) == shares != NOT_SHARED
    check(await shared.play("released", "NGRAM"), shared.unmoved)


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("NGRAM", ("release_memory_occupation", "resume_memory_occupation")),
        ("greedy", ("begin_weight_update", "end_weight_update")),
    ],
)
async def test_server_whose_weights_may_have_changed_shares_no_pages_any_more(
    shared: Shared, kind: str, paths: Sequence[str]
) -> None:
    """The last tests. On a CPU, both pairs of requests leave the weights as they were, so the answers are the same."""
    server, other = shared.servers[kind], shared.servers["STANDALONE"]
    salts = [f"{name} {kind} changed" for name in ("before", "after")]
    written, read_by_other = (fewer_sessions(salt) for salt in salts)
    read, written_by_server = (fewer_sessions(salt) for salt in salts)
    await play(written, other.url, {"": other.url})
    for path in paths:
        await post(f"{server.url}/{path}", {})
    assert await sharing(server.url) == NOT_SHARED

    await play(read, server.url, {})
    await play(written_by_server, server.url, {"": server.url})
    await play(read_by_other, other.url, {})

    assert cached_at_first(read + read_by_other) == 0
    check_answers(read + read_by_other, shared.unmoved)


async def post(url: str, body: Mapping[str, Any]) -> None:
    """Send a request to an engine's admin endpoint. Raises ClientResponseError if it is refused."""
    async with aiohttp.ClientSession(raise_for_status=True) as http, http.post(url, json=body):
        pass


async def sharing(url: str) -> frozenset[tuple[str, str]]:
    """The pages that an engine shares, and the reasons why it does not."""
    async with aiohttp.ClientSession(raise_for_status=True) as http, http.get(f"{url}/metrics") as answer:
        return frozenset(engine_sample(await answer.text()).sharing)
