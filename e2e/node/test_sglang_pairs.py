"""Sessions that change pools on every turn, on real SGLang in pods, for algorithms that can share pages.

They have the answers of the greedy engine alone, and almost all of the cached tokens of sessions that never moved.
STANDALONE with pages of 64 tokens in a directory is tested in test_sglang_pods.py, and NGRAM with Mooncake in
e2e/prefix_cache/test_mooncake.py. The directory also fails, and either engine is killed; `make e2e` does this only with
NGRAM and pages of 64 tokens. What the engines find of each prompt is compared with the recordings that are the contract
of the emulated engine.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dps_engines.launch import Algorithm
from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.engine_contract import storage as contract
from dps_testkit.engine_contract.storage import Step
from e2e.node import storage_faults
from e2e.node.sglang_fleet import QUESTIONS, Fleet, running
from e2e.node.sglang_router import WAIT_FOR_FETCHES, Pair
from e2e.prefix_cache import mooncake
from e2e.prefix_cache.acceptance import Urls, after_a_fetch, check_accepted
from e2e.prefix_cache.alternation import check, sessions
from e2e.prefix_cache.contract import answer_when_stored, check_recorded
from e2e.prefix_cache.sessions import play

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

OBSTACLE = mooncake.obstacle()
NEEDS_MOONCAKE = pytest.mark.skipif(OBSTACLE is not None, reason=OBSTACLE or "")


def _in_directory(algorithm: Algorithm, page_tokens: int) -> Pair:
    return Pair(algorithm, page_tokens, ("--page-size", str(page_tokens), *WAIT_FOR_FETCHES))


NGRAM = _in_directory("Ngram", PAGE_TOKENS)
SMALL_PAGES = [_in_directory("Standalone", 1), _in_directory("Ngram", 1)]
MOONCAKE = Pair("Standalone", flags=WAIT_FOR_FETCHES, backend="Mooncake")

RECORDED = [NGRAM, *SMALL_PAGES]
"""What the engines of these pairs find of each prompt is recorded. The recording of STANDALONE with pages of 64 tokens
is compared in e2e/prefix_cache/test_alternating_sessions.py."""
PAIRS = [*RECORDED, pytest.param(MOONCAKE, marks=NEEDS_MOONCAKE)]

LONG = pytest.mark.long
IN_DIRECTORY = [NGRAM, *(pytest.param(pair, marks=LONG) for pair in SMALL_PAGES)]
IN_MOONCAKE = pytest.param(MOONCAKE, marks=[NEEDS_MOONCAKE, LONG])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PAIRS, ids=str)
async def fleet(
    request: pytest.FixtureRequest, node: Cluster, kube: Kube, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    async with running(node, kube, tmp_path_factory.mktemp("sglang"), request.param) as fleet:
        yield fleet


async def test_alternating_sessions_equal_sessions_that_never_moved(fleet: Fleet) -> None:
    """Eight concurrent sessions, half of them with streaming."""
    moved = sessions("moved")
    await play(moved, fleet.gateway, fleet.engines, fleet.pair.page_tokens)

    check(moved, fleet.unmoved, fleet.pair.page_tokens)


async def test_acceptance_after_a_fetch_equals_that_of_a_cold_engine(fleet: Fleet) -> None:
    urls = Urls(fleet.gateway, fleet.engines["greedy"], fleet.engines["speculative"])
    fetched, cold = await after_a_fetch(urls, fleet.pair.algorithm, fleet.pair.page_tokens)

    check_accepted(fetched, cold, fleet.pair.page_tokens)


@pytest.mark.parametrize("fleet", RECORDED, ids=str, indirect=True)
async def test_engines_find_of_each_prompt_what_was_recorded(fleet: Fleet) -> None:
    page_tokens = fleet.pair.page_tokens

    async def request(step: Step) -> dict[str, Any]:
        return await answer_when_stored(fleet.engines[step.engine], step, page_tokens)

    check_recorded(await contract.play(request), fleet.pair.algorithm, page_tokens)


@pytest.mark.parametrize("fleet", IN_DIRECTORY, ids=str, indirect=True)
@pytest.mark.parametrize("fault", storage_faults.DIRECTORY)
async def test_faults_of_the_directory_cause_no_wrong_answer(fleet: Fleet, fault: str) -> None:
    await storage_faults.check_directory_fault(fleet, fault)


@pytest.mark.parametrize("fleet", [*IN_DIRECTORY, IN_MOONCAKE], ids=str, indirect=True)
@pytest.mark.parametrize("pool", QUESTIONS)
async def test_a_killed_engine_causes_neither_a_wrong_answer_nor_an_error(fleet: Fleet, pool: str) -> None:
    """It is killed while it writes and fetches pages and sends a stream, which the other one continues."""
    await storage_faults.check_killed_engine(fleet, pool)
