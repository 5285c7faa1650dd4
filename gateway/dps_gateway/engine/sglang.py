"""The paths and the rules that are specific to SGLang. This module performs no I/O.

They serve vLLM as well, whose API is close enough. Other code that depends on the kind of engine: the chat rules in
`prompt`, which follow SGLang; SGLang's extensions of the OpenAI API in `api` and `prompt` (/generate, /model_info,
/server_info, `input_ids` and `sglext`); and the differences between SGLang's and vLLM's lists of models and
administrative endpoints in `api/passthrough.py`.
"""

from typing import Any

import orjson

from dps_gateway.engine.usage import text_or_none, token_count, total
from dps_gateway.routing.decision import FETCH_THRESHOLD_TOKENS, CacheUnits
from dps_gateway.upstream.replica import Configuration, Load


class SGLang:
    """The paths and answers of an SGLang server."""

    provider = "sglang"
    """The span attribute `gen_ai.provider.name`."""
    health_path = "/v1/models"
    """It answers with a status below 500 if and only if the engine is ready. /health is not used, because SGLang
    generates a token for it, which takes up to a second."""

    generation_path = "/health_generate"
    """SGLang generates a token for it only if it has no other requests, and answers 503 after 20 s without any."""

    load_path = "/v1/loads?include=core"
    configuration_path = "/server_info"

    cache_fields = ("model", "lora_path", "cache_salt", "extra_key", "image_data", "video_data", "audio_data")
    """The request fields that select a KV cache: prompts that differ in one of them share no cached prefix.

    In SGLang 0.5, `RadixKey.extra_key` is built from the cache salt and the LoRA adapter, and media are hashed."""

    def load_of(self, document: Any) -> Load | None:
        """The load in a parsed answer to a request of `load_path`, or None if it reports none that is valid."""
        ranks = document.get("loads") if isinstance(document, dict) else None
        if not isinstance(ranks, list):
            return None
        loads = [load for rank in ranks if (load := _load_of_rank(rank)) is not None]
        if not loads or len(loads) != len(ranks):
            return None
        return Load(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            sum(load.waiting_tokens for load in loads),
            total([load.limit for load in loads]),
            total([load.free_tokens for load in loads]),
        )

    def configuration_of(self, document: Any) -> Configuration | None:
        """The configuration in a parsed answer to a request of `configuration_path`, or None if it has none.

        The fetch threshold is at least a page. The plugin dps_sglang adds `dps_cache_salt_header`.

        `max_running_requests` is an argument of the server, and null if SGLang derives the limit from the memory.
        """
        if not isinstance(document, dict):
            return None
        page = token_count(document.get("page_size")) or 1
        threshold = _fetch_threshold(document.get("hicache_storage_backend_extra_config"))
        header = text_or_none(document.get("dps_cache_salt_header"))
        states = document.get("internal_states")
        ranks = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
        limits = [token_count(state.get("effective_max_running_requests_per_dp")) or 0 for state in ranks]
        running = sum(limits) if all(limits) else 0
        limit = running or token_count(document.get("max_running_requests")) or None
        return Configuration(CacheUnits(page, max(page, threshold)), header, limit)


def _fetch_threshold(extra_config: Any) -> int:
    """The fetch threshold in the value of `--hicache-storage-backend-extra-config`; SGLang's default if it has none.

    The value is JSON, or `@` and the path of a file that only the engine can read.
    """
    try:
        settings = orjson.loads(extra_config) if isinstance(extra_config, str) else None
    except orjson.JSONDecodeError:
        settings = None
    found = token_count(settings.get("prefetch_threshold")) if isinstance(settings, dict) else None
    return FETCH_THRESHOLD_TOKENS if found is None else found


def _load_of_rank(rank: Any) -> Load | None:
    """The load of one data-parallel rank. SGLang 0.5.8 does not report the tokens of waiting requests."""
    if not isinstance(rank, dict):
        return None
    running, waiting = (token_count(rank.get(field)) for field in ("num_running_reqs", "num_waiting_reqs"))
    if running is None or waiting is None:
        return None
    capacity, used = (token_count(rank.get(field)) for field in ("max_total_num_tokens", "num_used_tokens"))
    return Load(
        running,
        waiting,
        token_count(rank.get("num_waiting_uncached_tokens")) or 0,
        token_count(rank.get("max_running_requests")) or None,
        max(0, capacity - used) if capacity and used is not None else None,
    )
