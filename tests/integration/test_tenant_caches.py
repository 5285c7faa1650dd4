"""Tenants' prefix caches in the engines: a tenant never reads tokens that another tenant's requests cached."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from dps_local.stack import MODEL
from dps_testkit.data_plane import common_cache
from dps_testkit.processes import Engine, Gateway, LocalProcesses

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (
    "a prompt that both tenants send, word for word, with enough tokens to recognise it in the cache " * 4
)
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "completions " + PROMPT, "max_tokens": 2}),
    "generate": ("/generate", {"text": "generate " + PROMPT, "sampling_params": {"max_new_tokens": 2}}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "messages " + PROMPT}], "max_tokens": 2},
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Gateway, Engine]]:
    """A gateway, and the engine to which it sends all requests."""
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys").write_text("team-a:sk-alpha\nteam-b:sk-beta\n")
    settings = {"auth": {"keysFile": str(folder / "keys")}, "routing": {"policy": "AlwaysGreedy"}}
    async with LocalProcesses(folder) as processes:
        flags = [*common_cache(folder), "--emulate-speed", "200"]
        speculative, greedy = await processes.start_engines("speculative", "greedy", arguments=flags)
        yield await processes.start_gateway([speculative], [greedy], settings), greedy


async def cached_tokens(url: str, kind: str, key: str = "", **fields: Any) -> tuple[int, int]:
    """The prompt's length, and how many of its tokens the engine found in its cache."""
    path, body = REQUESTS[kind]
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(url + path, json={"model": MODEL, **body, **fields}, headers=headers) as response,
    ):
        answer = await response.json()
    if kind == "generate":
        return answer["meta_info"]["prompt_tokens"], answer["meta_info"]["cached_tokens"]
    usage = answer["usage"]
    if kind == "messages":
        cached = usage.get("cache_read_input_tokens", 0)
        return usage["input_tokens"] + cached, cached
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("kind", REQUESTS)
async def test_only_the_tenant_itself_finds_its_prompt_cached(
    tenants_gateway: tuple[Gateway, Engine], kind: str
) -> None:
    gateway, engine = tenants_gateway
    length, first = await cached_tokens(gateway.url, kind, "sk-alpha")
    assert first < length - 1
    assert await cached_tokens(gateway.url, kind, "sk-alpha") == (length, length - 1)
    assert (await cached_tokens(gateway.url, kind, "sk-beta"))[1] < length - 1
    assert (await cached_tokens(engine.url, kind))[1] < length - 1


async def test_client_salt_narrows_the_tenants_cache(tenants_gateway: tuple[Gateway, Engine]) -> None:
    gateway, _ = tenants_gateway

    async def cached(key: str, salt: str) -> bool:
        length, tokens = await cached_tokens(gateway.url, "generate", key, cache_salt=salt)
        return tokens == length - 1

    assert [await cached(key, "one") for key in ("sk-alpha", "sk-alpha", "sk-beta")] == [False, True, False]
    assert not await cached("sk-alpha", "two")
