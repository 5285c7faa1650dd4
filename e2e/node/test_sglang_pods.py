"""Real SGLang in pods of a DPSRouter whose pools share a prefix cache in Mooncake, while engines fail.

Sessions change pools on every turn. No request fails, all answers are those of a greedy engine alone, and the other
engine continues the streams of one that is killed.
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import aiohttp
import pytest
import pytest_asyncio

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_local.stack import MODEL as SERVED_NAME
from dps_sglang.metrics import PAGES
from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.http import metric
from dps_testkit.waiting import PATIENCE_SECONDS, wait_until
from e2e.node.containers import kill
from e2e.node.sessions import alternating, turns
from e2e.node.sglang_fleet import QUESTIONS, ROUTER, Fleet, running
from e2e.node.streams import LongStream
from e2e.prefix_cache import mooncake
from e2e.prefix_cache.acceptance import Urls, after_a_fetch, check_accepted
from e2e.prefix_cache.alternation import LONG, SHORT, check, check_answers, lacking, sessions
from e2e.prefix_cache.sessions import play
from e2e.prefix_cache.shared_servers import FETCH_THRESHOLD

ATTEMPTS = 6
"""Rounds of sessions after a fault, in one of which the pools must share pages again."""
pytestmark = mooncake.MARKS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(node: Cluster, kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with running(node, kube, tmp_path_factory.mktemp("sglang")) as fleet:
        yield fleet


async def test_turns_are_routed_to_engines_started_by_the_operator(fleet: Fleet) -> None:
    session = await asyncio.to_thread(list, turns(fleet.gateway, SERVED_NAME, alternating(6)))
    lengths = [turn.prompt_tokens for turn in session]

    assert [(turn.number, turn.pool) for turn in session] == [
        (number, "speculative" if number % 2 == 0 else "greedy") for number in range(1, 7)
    ]
    assert [turn.engine_prompt_tokens for turn in session] == lengths
    assert [turn.delta_tokens for turn in session] == [
        lengths[0],
        *(after - before for before, after in pairwise(lengths)),
    ]


async def test_alternating_sessions_equal_sessions_that_never_moved(fleet: Fleet) -> None:
    """Eight concurrent sessions, half of them with streaming."""
    moved = sessions("moved")
    await play(moved, fleet.gateway, fleet.engines)

    check(moved, fleet.unmoved)


async def test_acceptance_after_a_fetch_equals_that_of_a_cold_engine(fleet: Fleet) -> None:
    urls = Urls(fleet.gateway, fleet.engines["greedy"], fleet.engines["speculative"])
    fetched, cold = await after_a_fetch(urls, "Standalone", PAGE_TOKENS)

    check_accepted(fetched, cold, PAGE_TOKENS)


@pytest.mark.parametrize("pool", QUESTIONS)
async def test_a_killed_engine_causes_neither_a_wrong_answer_nor_an_error(fleet: Fleet, pool: str) -> None:
    """It is killed while it stores and fetches pages and sends a stream, which the other one continues."""
    pod = fleet.engine_pod(pool)
    killed = asyncio.Event()
    stream = LongStream(f"stream of the {pool} engine", LONG if pool == "greedy" else SHORT)

    async with asyncio.TaskGroup() as group:
        group.create_task(stream.continued(fleet.gateway, killed))
        await asyncio.wait_for(stream.begun.wait(), PATIENCE_SECONDS)
        assert stream.pool == pool
        group.create_task(fleet.play_until(killed, f"{pool} killed"))
        await transferring(fleet.engines[pool])
        await asyncio.to_thread(kill, fleet.node, pod)
        killed.set()

    await asyncio.to_thread(fleet.restarted, pod, pool)
    for attempt in range(ATTEMPTS):
        after = sessions(f"after {pool} killed {attempt}")
        await play(after, fleet.gateway, fleet.engines)
        check_answers(after, fleet.unmoved)
        if lacking(after, fleet.unmoved) <= PAGE_TOKENS + FETCH_THRESHOLD:
            break
    check(after, fleet.unmoved)


async def transferring(engine: str) -> None:
    """Wait until an engine has stored and fetched further pages."""

    async def pages() -> list[float]:
        return [await metric(engine, f"{PAGES}_total", outcome=outcome) for outcome in ("stored", "read")]

    before = await pages()

    async def transferred() -> bool:
        return all(now > then for now, then in zip(await pages(), before, strict=True))

    await wait_until(transferred, f"{engine} has stored and fetched pages")


async def test_engine_whose_weights_are_replaced_is_reported_to_share_no_pages(fleet: Fleet) -> None:
    """The last test, because the engine shares none until it is restarted. The operator reads the engine's metrics."""
    model = fleet.kube.get("dpsrouter", ROUTER)["spec"]["model"]["name"]
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{fleet.engines['greedy']}/update_weights_from_disk", json={"model_path": model}),
    ):
        pass
    await asyncio.to_thread(
        fleet.kube.until, ROUTER, PATIENCE_SECONDS, Ready="True", PrefixCacheShared="EngineNotSharing"
    )
