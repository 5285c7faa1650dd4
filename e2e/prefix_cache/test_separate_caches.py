"""A real STANDALONE server that shares no pages: tenants are kept apart, and cached tokens cost no acceptance."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from dps_sglang.cache_salt import ANNOUNCEMENT, SALT_HEADER
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from e2e.prefix_cache.acceptance import after_a_turn, check_accepted_after_a_turn
from e2e.prefix_cache.shared_servers import shared_servers
from e2e.prefix_cache.tenants import ENDPOINTS, TEMPLATE_TOKENS, WORDS, cached_tokens, tenants_gateway
from e2e.real_sglang.local_sglang import tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Gateway, Engine]]:
    """A gateway with the tenants' keys, and the engine behind it."""
    folder = tmp_path_factory.mktemp("separate")
    async with (
        shared_servers(folder, kinds=["STANDALONE"]) as servers,
        LocalProcesses(folder, tiny_model()) as processes,
    ):
        yield await tenants_gateway(processes, folder, servers["STANDALONE"]), servers["STANDALONE"]


async def test_plugin_announces_the_header_that_it_reads(tenants: tuple[Gateway, Engine]) -> None:
    _, engine = tenants
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.get(f"{engine.url}/server_info") as answer,
    ):
        assert (await answer.json())[ANNOUNCEMENT] == SALT_HEADER


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_tenants_do_not_read_each_others_tokens_from_memory(
    tenants: tuple[Gateway, Engine], path: str
) -> None:
    gateway, _ = tenants
    assert await cached_tokens(gateway, path, "alpha") < TEMPLATE_TOKENS
    assert await cached_tokens(gateway, path, "beta") < TEMPLATE_TOKENS
    assert await cached_tokens(gateway, path, "alpha") >= WORDS


async def test_acceptance_after_cached_tokens_equals_that_of_a_cold_server(
    tenants: tuple[Gateway, Engine],
) -> None:
    """Without the plugin, SGLang drafts with the KV of another request's continuation."""
    _, engine = tenants
    check_accepted_after_a_turn(*await after_a_turn(engine.url))
