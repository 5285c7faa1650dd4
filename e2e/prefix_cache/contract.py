"""Plays the contract of the emulated engine's storage on real SGLang servers. RECORD_CONTRACT writes the recordings."""

import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_testkit.engine_contract.storage import Step, play, recording
from e2e.prefix_cache.sessions import stored_tokens, until_stored


async def check_recorded(urls: Mapping[str, str], algorithm: str) -> None:
    """Assert that servers find of each prompt what was recorded, or record it. urls: by `Step.engine`."""

    async def answer_when_stored(step: Step) -> dict[str, Any]:
        """The `meta_info` of the answer, when all pages of the prompt are stored.

        An engine always computes the last token. If it had all others in memory, it also had the page of the last one,
        and stores none.
        """
        url = urls[step.engine]
        before = await stored_tokens(url)
        async with (
            aiohttp.ClientSession(raise_for_status=True) as http,
            http.post(f"{url}/generate", json=step.body) as response,
        ):
            meta: dict[str, Any] = (await response.json())["meta_info"]
        in_memory = (meta["cached_tokens_details"] or {}).get("device", 0)
        if in_memory < step.tokens - 1:
            in_pages = step.tokens // PAGE_TOKENS * PAGE_TOKENS
            await until_stored(url, before + in_pages - meta["cached_tokens"])
        return meta

    found = await play(answer_when_stored)
    file = recording(algorithm)
    if "RECORD_CONTRACT" in os.environ:
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(file.read_text())
