"""Requests of three tenants to real SGLang servers, on every endpoint whose prompts SGLang caches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from dps_local.stack import MODEL
from dps_testkit.http import metric
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from e2e.prefix_cache.sessions import settled_tokens, until_stored

KEYS = {"alpha": "sk-alpha", "beta": "sk-beta", "gamma": "sk-gamma"}
"""Each tenant's API key."""
WORDS = 600
TEMPLATE_TOKENS = 64
"""More than the tokens with which the chat template begins every prompt, so that they are the same on all endpoints."""
ENDPOINTS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 16, "store": False},
    "/v1/messages": {"max_tokens": 1},
    "/generate": {"sampling_params": {"max_new_tokens": 1}},
    "/v1/score": {"items": [" yes"], "label_token_ids": [1, 2]},
}


async def tenants_gateway(processes: LocalProcesses, folder: Path, engine: Engine) -> Gateway:
    """A gateway with the tenants' keys, all of whose requests are served by this engine."""
    keys = folder / "keys"
    keys.write_text("".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()))
    settings: Mapping[str, Mapping[str, Any]] = {
        "auth": {"keysFile": str(keys)},
        "routing": {"commonPrefixCache": True},
    }
    return await processes.start_gateway([engine], [engine], settings)


async def check_separated(path: str, writer: Gateway, reader: Gateway, writing: Engine) -> None:
    """Assert that no tenant reads another's tokens, neither from memory nor from the storage that two engines share.

    writer, reader: gateways with the tenants' keys in front of one engine each. writing: the engine of the first one,
    which has a tenant's prompt in memory and in the storage, from which the other engine reads.
    """
    before = await settled_tokens(writing.url)
    assert await cached_tokens(writer, path, "alpha") < TEMPLATE_TOKENS
    await until_stored(writing.url, before + WORDS)
    await settled_tokens(writing.url)  # the other processes of the engine write their pages, too

    assert await cached_tokens(writer, path, "beta") < TEMPLATE_TOKENS
    assert await cached_tokens(reader, path, "gamma") < TEMPLATE_TOKENS
    assert await cached_tokens(reader, path, "alpha") >= WORDS
    assert await cached_tokens(writer, path, "alpha") >= WORDS


async def cached_tokens(gateway: Gateway, path: str, tenant: str) -> int:
    """The cached tokens of a prompt that is the same for all tenants, but differs between endpoints."""
    text = f"{path} " + " ".join(f"word{number}" for number in range(WORDS))
    prompt = {
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/generate": {"text": text},
        "/v1/score": {"query": text},
    }.get(path, {"messages": [{"role": "user", "content": text}]})
    body = {"model": MODEL, **prompt, **ENDPOINTS[path]}
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    before = await _all_cached_tokens(gateway)
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(gateway.url + path, json=body, headers=headers) as response,
    ):
        answer = await response.json()
    if path == "/generate":
        return int(answer["meta_info"]["cached_tokens"])
    if path == "/v1/score":  # its answers do not report them
        return int(await _all_cached_tokens(gateway) - before)
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(usage.get("cache_read_input_tokens") or details.get("cached_tokens") or 0)


async def _all_cached_tokens(gateway: Gateway) -> float:
    """The cached tokens of all requests to the gateway's engine since it started."""
    (engine,) = yaml.safe_load(gateway.file.read_text())["pools"]["greedy"]["endpoints"]
    return await metric(engine, "sglang:cached_tokens_total")
