"""Where an engine found the cached tokens of a prompt: SGLang's `cached_tokens_details`. This module performs no I/O.

An OpenAI answer has them in the extension `sglext`, if the request asks for them and any token was cached. A stream has
them in an event of its own before the one with usage.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import orjson

from dps_gateway.engine.dialect import Usage, token_count

REQUEST_FIELD: Final = "return_cached_tokens_details"
SOURCES: Final = re.compile(rb'"sglext":\s*\{')
"""Matches an answer or event that may have the sources. Quotes in generated text are escaped, so text never matches."""

_ALONE: Final = re.compile(rb',\s*"sglext":\s*\{\s*"cached_tokens_details":\s*\{[^{}]*\}\s*\}')


@dataclass(frozen=True, slots=True)
class PromptSources:
    """The tokens of a prompt, by the source of their KV."""

    held: int
    """Cached in the replica's own memory."""
    fetched: int
    """Fetched from a prefix cache in common with other replicas."""
    computed: int
    """Prefilled."""


def prompt_sources(usage: Usage, common_prefix_cache: bool) -> PromptSources | None:
    """The sources of a prompt's tokens; None if the engine has not reported them."""
    cached, fetched = usage.cached_tokens, usage.fetched_tokens
    if fetched is None and not common_prefix_cache:
        fetched = 0
    if cached is None or fetched is None:
        return None
    return PromptSources(max(0, cached - fetched), fetched, max(0, usage.prompt_tokens - cached))


def fetched_tokens(details: Any, cached_tokens: int | None) -> int | None:
    """The tokens that the engine fetched from its storage; None if `details` do not state them.

    If no token was cached, there are no details. An engine without storage has details without `storage`.
    """
    if isinstance(details, dict):
        return token_count(details.get("storage", 0))
    return 0 if cached_tokens == 0 else None


def cached_tokens_details(document: Any) -> Any:
    """`cached_tokens_details` of a parsed OpenAI answer or stream event; None if there are none."""
    extension = document.get("sglext") if isinstance(document, dict) else None
    return extension.get("cached_tokens_details") if isinstance(extension, dict) else None


def read_fetched(event: bytes) -> int | None:
    """The tokens that were fetched from storage, according to the data of a stream event; None if it has none."""
    try:
        return fetched_tokens(cached_tokens_details(orjson.loads(event)), None)
    except orjson.JSONDecodeError:
        return None


def without_sources(content: bytes) -> bytes:
    """An answer or event without the sources. All other bytes are kept, unless it has other extensions as well."""
    if not SOURCES.search(content):
        return content
    shorter, found = _ALONE.subn(b"", content, count=1)
    if found:
        return shorter
    start = max(0, content.find(b"{"))
    try:
        document = orjson.loads(content[start:])
    except orjson.JSONDecodeError:
        return content
    extension = document.get("sglext") if isinstance(document, dict) else None
    if not isinstance(extension, dict) or "cached_tokens_details" not in extension:
        return content
    del extension["cached_tokens_details"]
    if not extension:
        del document["sglext"]
    return content[:start] + orjson.dumps(document)
