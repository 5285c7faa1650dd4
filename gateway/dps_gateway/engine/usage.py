"""The token counts that engines report. This module performs no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

MAX_TOKENS: Final = 2**40
"""Larger counts are not valid. Sums of valid ones have less than 64 bits, as in spans and in shared memory."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer, or the sums over several answers to a request, as the engine reports them."""

    prompt_tokens: int
    """0 if the answer does not report it yet, because the engine answers in the background."""
    completion_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens found in the KV cache, or None if the engine does not report them."""
    fetched_tokens: int | None = None
    """The part of `cached_tokens` that was fetched from storage, or None if the engine does not report it. It is 0 if
    no token was cached."""
    verifications: int | None = None
    """Verifications of drafts that yielded the answer, or None if the engine does not report them."""
    finish_reason: str | None = None
    response_id: str | None = None
    model: str | None = None
    several: bool = False
    """Whether these are sums. Each of several samples of a prompt adds the prompt's tokens."""


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
    """The tokens that SGLang fetched from its storage, from its `cached_tokens_details`; None if they are not stated.

    If no token was cached, there are no details. An engine without storage has details without `storage`.
    """
    if isinstance(details, dict):
        return token_count(details.get("storage", 0))
    return 0 if cached_tokens == 0 else None


def total(counts: Sequence[int | None]) -> int | None:
    """The sum of counts; None if one of them is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The sums over several answers. A sum is None if the engine has not reported the count for one of them."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=total([usage.cached_tokens for usage in usages]),
        fetched_tokens=total([usage.fetched_tokens for usage in usages]),
        verifications=total([usage.verifications for usage in usages]),
        several=True,
    )


def token_count(value: Any) -> int | None:
    """`value` if it is a valid token count (an integer from 0 to MAX_TOKENS), else None."""
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS
    return value if valid else None


def text_or_none(value: Any) -> str | None:
    """`value` if it is a string, else None."""
    return value if isinstance(value, str) else None
