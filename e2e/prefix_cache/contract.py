"""Plays the contract of the emulated engine's storage on real SGLang servers. RECORD_CONTRACT writes the recordings."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from dps_testkit.engine_contract.storage import Step, recording
from e2e.prefix_cache.sessions import stored_tokens, until_stored


async def answer_to(url: str, step: Step) -> dict[str, Any]:
    """The `meta_info` of the answer to a step's request at this base URL."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{url}/generate", json=step.body) as response,
    ):
        meta: dict[str, Any] = (await response.json())["meta_info"]
    return meta


async def answer_when_stored(url: str, step: Step, page_tokens: int) -> dict[str, Any]:
    """`answer_to`, when all pages of the prompt are stored.

    An engine always computes the last token. If it had all others in memory, it also had the page of the last one, and
    stores none.
    """
    before = await stored_tokens(url)
    meta = await answer_to(url, step)
    in_memory = (meta["cached_tokens_details"] or {}).get("device", 0)
    if in_memory < step.tokens - 1:
        await until_stored(url, before + step.tokens // page_tokens * page_tokens - meta["cached_tokens"])
    return meta


def check_recorded(found: Sequence[Mapping[str, Any]], algorithm: str, page_tokens: int) -> None:
    """Assert that servers found what was recorded, or record it."""
    file = recording(algorithm, page_tokens)
    if "RECORD_CONTRACT" in os.environ:
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(file.read_text())
