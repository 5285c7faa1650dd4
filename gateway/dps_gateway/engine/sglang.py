"""SGLang: its chat rendering, its health paths, and the answers of its /generate endpoint.

This module performs no I/O.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from dps_gateway.cached_prompt import FETCH_THRESHOLD_TOKENS, CacheUnits
from dps_gateway.engine.dialect import (
    AnswerFormat,
    RequestedByGateway,
    Usage,
    text_or_none,
    token_count,
    total,
    total_usage,
)
from dps_gateway.engine.sources import fetched_tokens
from dps_gateway.prompt import chat, messages, responses
from dps_gateway.prompt.chat import ChatInput, ContentFormat
from dps_gateway.upstream.replica import Configuration, Load

_HARMONY: Final = "<|channel|>"
"""A token of the harmony format, which the chat templates of other models do not contain."""


class SGLang:
    """The dialect of an SGLang server."""

    provider = "sglang"
    health_path = "/v1/models"
    """/health is not used, because SGLang generates a token for it, which takes up to a second."""

    generation_path = "/health_generate"
    """SGLang generates a token for it only if it has no other requests, and answers 503 after 20 s without any."""

    load_path = "/v1/loads?include=core"

    configuration_path = "/server_info"

    cache_fields = ("model", "lora_path", "cache_salt", "extra_key", "image_data", "video_data", "audio_data")
    """In SGLang 0.5, `RadixKey.extra_key` is built from the cache salt and the LoRA adapter, and media are hashed."""

    def content_format(self, chat_template: str) -> ContentFormat:
        return chat.content_format(chat_template)

    def chat_input(self, body: dict[str, Any], expects: ContentFormat) -> ChatInput:
        return chat.chat_input(body, expects)

    def chat_of_messages(self, body: dict[str, Any], chat_template: str) -> dict[str, Any]:
        """A template with `</think>` is taken to mean that the engine has a reasoning parser (--reasoning-parser)."""
        return messages.chat_request(
            body,
            inline_system=messages.renders_inline_system(chat_template),
            reasoning="</think>" in chat_template,
        )

    def chat_of_responses(self, body: dict[str, Any], chat_template: str) -> dict[str, Any]:
        """SGLang does not use the chat template for requests to models with the harmony format (gpt-oss)."""
        if _HARMONY in chat_template:
            raise ValueError("requests to models with the harmony format cannot be counted")
        return responses.chat_request(body, inline_system=messages.renders_inline_system(chat_template))

    def load_of(self, document: Any) -> Load | None:
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
        """SGLang's fetch threshold is at least a page. The plugin dps_sglang adds `dps_cache_salt_header`.

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


class _GenerateAnswers:
    """Answers of /generate. The `meta_info` of every event contains usage, even if it was not requested.

    The answer to a batch, or to several samples of one prompt, is a list. In a stream, the events of each of these
    answers have its `index`.
    """

    closing = (b"data: [DONE]",)
    usage_marker = re.compile(rb'"meta_info":\s*\{')
    part_marker = re.compile(rb'"index":\s*(\d+)')

    def request_usage(
        self, body: Mapping[str, Any], raw: bytes, *, sources: bool
    ) -> tuple[bytes, RequestedByGateway]:
        return raw, RequestedByGateway()

    def usage_of(self, document: Any) -> Usage | None:
        if isinstance(document, list):
            usages = [usage for answer in document if (usage := self._usage_of_one(answer)) is not None]
            if not usages or len(usages) != len(document):
                return None
            return usages[0] if len(usages) == 1 else total_usage(usages)
        return self._usage_of_one(document)

    def _usage_of_one(self, document: Any) -> Usage | None:
        meta = document.get("meta_info") if isinstance(document, dict) else None
        if not isinstance(meta, dict):
            return None
        prompt_tokens = token_count(meta.get("prompt_tokens"))
        if prompt_tokens is None:
            return None
        cached = token_count(meta.get("cached_tokens"))
        finish = meta.get("finish_reason")
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=token_count(meta.get("completion_tokens")) or 0,
            cached_tokens=cached,
            fetched_tokens=fetched_tokens(meta.get("cached_tokens_details"), cached),
            finish_reason=text_or_none(finish.get("type")) if isinstance(finish, dict) else None,
            response_id=text_or_none(meta.get("id")),
        )


GENERATE_ANSWERS: Final[AnswerFormat] = _GenerateAnswers()
