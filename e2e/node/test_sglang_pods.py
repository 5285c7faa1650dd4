"""Real SGLang in pods of a DPSRouter whose pools share a prefix cache, while its storage and its engines fail.

Sessions change pools on every turn. No request fails, all answers are those of a greedy engine alone, and after each
fault the pools share pages again. If an engine is killed, the other one continues its streams.
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_local.stack import MODEL as SERVED_NAME
from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.engine_contract import storage as contract
from dps_testkit.engine_contract.storage import Step
from dps_testkit.http import status_of
from dps_testkit.waiting import PATIENCE_SECONDS, eventually_async
from e2e.node import halting, sglang_router, storage_faults
from e2e.node.mounts import LOAD_SECONDS
from e2e.node.sessions import alternating, turns
from e2e.node.sglang_fleet import ATTEMPTS, QUESTIONS, Fleet, running
from e2e.node.sglang_router import PORT, ROUTER, Pair
from e2e.prefix_cache.acceptance import Urls, after_a_fetch, are_fetched, check_accepted
from e2e.prefix_cache.alternation import (
    answers,
    cached_at_first,
    cached_share,
    check_answers,
    fewer_sessions,
    sessions,
)
from e2e.prefix_cache.contract import answer_when_stored, answer_while, check_recorded
from e2e.prefix_cache.sessions import play

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

UNDISTURBED = 0.7
"""The least share of the cached tokens of sessions that never moved, although turns do not wait until pages are stored.

Between 79% and 100% were measured.
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(node: Cluster, kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with running(node, kube, tmp_path_factory.mktemp("sglang"), Pair("Standalone")) as fleet:
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


async def test_pools_share_pages(fleet: Fleet) -> None:
    played = await fleet.play(sessions("undisturbed"))
    assert cached_share(played, fleet.unmoved) >= UNDISTURBED
    await fleet.recover("none", played, kinds=sessions)


async def test_acceptance_after_a_fetch_equals_that_of_a_cold_engine(fleet: Fleet) -> None:
    urls = Urls(fleet.gateway, fleet.engines["greedy"], fleet.engines["speculative"])
    for attempt in range(ATTEMPTS):
        fetched, cold = await after_a_fetch(urls, fleet.pair.algorithm, PAGE_TOKENS, salt=str(attempt))
        if are_fetched(fetched, PAGE_TOKENS):
            break
    check_accepted(fetched, cold, PAGE_TOKENS)


@pytest_asyncio.fixture(loop_scope="module")
async def other_geometry(fleet: Fleet) -> AsyncIterator[str]:
    """The URL of an engine of another geometry, which was started by hand and uses the same directory."""
    kube, name = fleet.kube, "by-hand"
    kube.apply(sglang_router.by_hand(name, kube.get("deployment", f"{ROUTER}-greedy")))
    kube.kubectl("expose", "pod", name, "--port", str(PORT))
    with fleet.node.reach(kube, name, PORT) as url:

        async def serves() -> None:
            assert await status_of(f"{url}/health") == 200

        await eventually_async(serves, LOAD_SECONDS)
        yield url
    kube.kubectl("delete", "pod", name, "--grace-period=1")


async def test_an_engine_of_another_geometry_reads_and_damages_no_page(
    fleet: Fleet, other_geometry: str
) -> None:
    """It has the same weights and pages of the same size, and is asked for the same prompts with the same salts."""
    ours = fewer_sessions("ours first")
    await play(ours, fleet.gateway, fleet.engines)
    check_answers(ours, fleet.unmoved)
    stored = fleet.stored()

    theirs, same = fewer_sessions("theirs first"), fewer_sessions("ours first")
    for played in (theirs, same):
        await play(played, other_geometry, {"": other_geometry})
    assert answers(same) == answers(theirs)
    assert [answer for answer in answers(same) if answer in answers(ours)] == []
    assert cached_at_first(same) == 0
    assert stored.items() <= fleet.stored().items()
    assert len({page.parent.name for page in fleet.stored()}) == 2

    ours, others = fewer_sessions("theirs first"), fewer_sessions("at the same time")
    await asyncio.gather(fleet.play(ours), play(others, other_geometry, {}))
    assert cached_at_first(ours) == 0
    assert answers(others) == answers(theirs)
    await fleet.recover("an engine of another geometry", ours)


@pytest.mark.parametrize("pool", QUESTIONS)
async def test_a_killed_engine_causes_neither_a_wrong_answer_nor_an_error(fleet: Fleet, pool: str) -> None:
    """It is killed in the middle of a write and of a fetch, while it sends a stream, which the other one continues."""
    await storage_faults.check_killed_engine(fleet, pool)


@pytest.mark.parametrize("fault", storage_faults.DIRECTORY)
async def test_faults_of_the_directory_cause_no_wrong_answer(fleet: Fleet, fault: str) -> None:
    await storage_faults.check_directory_fault(fleet, fault)


async def test_engines_find_what_was_recorded_while_pages_cannot_be_read_or_arrive_late(fleet: Fleet) -> None:
    """The recording is the contract of the emulated engine."""

    async def request(step: Step) -> dict[str, Any]:
        url = fleet.engines[step.engine]
        if not step.failure:
            return await answer_when_stored(url, step, PAGE_TOKENS)
        failing = halting.requested(step.failure, fleet.requests[step.engine])
        return await answer_while(failing, url, step, PAGE_TOKENS)

    found = await contract.play(request, contract.TRANSFERS)
    check_recorded(found, fleet.pair.algorithm, PAGE_TOKENS, "-transfers")


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
