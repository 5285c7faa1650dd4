"""Plays the contract of the emulated engine's storage on real SGLang servers. RECORD_CONTRACT writes the recordings."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import aiohttp

from dps_sglang.metrics import PAGES
from dps_testkit.engine_contract.storage import SLOW, Step, recording
from dps_testkit.http import metric
from dps_testkit.waiting import wait_until
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


async def answer_while(
    failing: AbstractContextManager[None], url: str, step: Step, page_tokens: int, ranks: int = 1
) -> dict[str, Any]:
    """`answer_to` during the step's failure, and as `failed_pages` the pages that each of the ranks has counted."""
    outcome = "read" if step.failure == SLOW else step.failure
    before = await metric(url, f"{PAGES}_total", outcome=outcome)

    async def failed() -> int:
        return round(await metric(url, f"{PAGES}_total", outcome=outcome) - before) // ranks

    async def all_failed() -> bool:
        return await failed() >= step.tokens // page_tokens

    with failing:
        meta = await answer_to(url, step)
        await wait_until(all_failed, f"all pages are counted as {outcome}")
    return meta | {"failed_pages": await failed()}


def check_recorded(
    found: Sequence[Mapping[str, Any]], algorithm: str, page_tokens: int, kind: str = ""
) -> None:
    """Assert that servers found what was recorded, or record it."""
    file = recording(algorithm, page_tokens, kind)
    if "RECORD_CONTRACT" in os.environ:
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(file.read_text())
