"""How many drafts an engine accepts after a prefix that it has cached, or fetched after a greedy engine wrote it."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from e2e.prefix_cache.alternation import KINDS, LONG, SHORT
from e2e.prefix_cache.sessions import stored_tokens, until_stored

GENERATED_TOKENS = 48
PROMPTS = len(KINDS)
Answer = dict[str, Any]
"""An answer of SGLang's own endpoint, which reports verification steps."""
Leave = Callable[[Awaitable[object]], Awaitable[object]]
"""Sends requests, and closes their connections before all of them are answered."""


@dataclass(frozen=True)
class Urls:
    """Base URLs of a gateway and of the engines behind it, of which one speculates."""

    gateway: str
    greedy: str
    speculative: str


def leave_after(seconds: float) -> Leave:
    """Closes the connections after so many seconds."""

    async def leave(answers: Awaitable[object]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await answers

    return leave


async def after_a_fetch(
    urls: Urls, algorithm: str, page_tokens: int, salt: str = "", leaving: Sequence[Leave] = ()
) -> tuple[list[Answer], list[Answer]]:
    """Answers of the speculative engine to concurrent prompts: with a fetched prefix, and without cached tokens.

    NGRAM drafts from all text that the engine has generated, so that generates each answer once before.
    salt: other prompts for each. leaving: clients that have sent the prompts before.
    """
    random_ids = random.Random(f"{algorithm} {page_tokens} {salt}")
    prompts = [random_ids.choices(range(100, 100_000), k=LONG) for _ in range(PROMPTS)]
    before = await stored_tokens(urls.greedy)
    fetched, cold, learned = (f"{name} {algorithm} {salt}" for name in ("fetched", "cold", "learned"))
    first = await _generate(urls.gateway, prompts, 1, fetched)
    await until_stored(urls.greedy, before + PROMPTS * _in_pages(page_tokens))
    prompts = _second_prompts(prompts, first, random_ids)
    if algorithm.upper() == "NGRAM":
        await _generate(urls.speculative, prompts, GENERATED_TOKENS, learned)
    for leave in leaving:
        await leave(_generate(urls.gateway, prompts, GENERATED_TOKENS, fetched))
    return (
        await _generate(urls.gateway, prompts, GENERATED_TOKENS, fetched),
        await _generate(urls.speculative, prompts, GENERATED_TOKENS, cold),
    )


async def after_a_turn(url: str) -> tuple[list[Answer], list[Answer]]:
    """Answers to concurrent second turns: with the first turn in the engine's memory, and without cached tokens."""
    random_ids = random.Random(0)
    prompts = [random_ids.choices(range(100, 100_000), k=SHORT) for _ in range(PROMPTS)]
    first = await _generate(url, prompts, GENERATED_TOKENS, "cached")
    prompts = _second_prompts(prompts, first, random_ids)
    return (
        await _generate(url, prompts, GENERATED_TOKENS, "cached"),
        await _generate(url, prompts, GENERATED_TOKENS, "cold"),
    )


def check_accepted_after_a_turn(cached: Sequence[Answer], cold: Sequence[Answer]) -> None:
    """Assert that the first turn was cached, and that as many drafts were accepted as without cached tokens."""
    assert _cached(cold) == [0] * PROMPTS
    assert all(tokens > SHORT for tokens in _cached(cached))
    assert _accepted(cached) == _accepted(cold)


def are_fetched(answers: Sequence[Answer], page_tokens: int) -> bool:
    """Whether exactly the complete pages of each prefix were cached."""
    return _cached(answers) == [_in_pages(page_tokens)] * PROMPTS


def check_accepted(
    fetched: Sequence[Answer], cold: Sequence[Answer], page_tokens: int, *, more_cached: bool = False
) -> None:
    """Assert that the prefixes were fetched, and that as many drafts were accepted as without cached tokens.

    more_cached: whether parts of the prompts that come after the prefix may be cached as well.
    """
    assert _cached(cold) == [0] * PROMPTS
    in_pages = _in_pages(page_tokens)
    assert all(tokens == in_pages or (more_cached and tokens > in_pages) for tokens in _cached(fetched))
    assert _accepted(fetched) == _accepted(cold)
    assert sum(steps for _, steps in _accepted(cold)) < PROMPTS * GENERATED_TOKENS


def check_fewer_accepted(fetched: Sequence[Answer], cold: Sequence[Answer], page_tokens: int) -> None:
    """Assert that the prefixes were fetched, and that fewer drafts were accepted than without cached tokens."""
    assert _cached(cold) == [0] * PROMPTS
    assert are_fetched(fetched, page_tokens)
    assert [tokens for tokens, _ in _accepted(fetched)] == [tokens for tokens, _ in _accepted(cold)]
    assert sum(steps for _, steps in _accepted(fetched)) > sum(steps for _, steps in _accepted(cold))


def _second_prompts(
    prompts: Sequence[list[int]], answers: Sequence[Answer], random_ids: random.Random
) -> list[list[int]]:
    return [
        prompt + answer["output_ids"] + random_ids.choices(range(100, 100_000), k=SHORT)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


async def _generate(url: str, prompts: Sequence[Sequence[int]], tokens: int, name: str) -> list[Answer]:
    """Answers to concurrent prompts of token ids. name: of the sessions and of the part of the cache that they use."""

    async def answer(http: aiohttp.ClientSession, number: int, prompt: Sequence[int]) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        key = f"{name} {number}"
        body = {"input_ids": prompt, "sampling_params": sampling, "extra_key": key}
        async with http.post(f"{url}/generate", json=body, headers={"x-session-id": key}) as response:
            answer: Answer = await response.json()
        return answer

    async with aiohttp.ClientSession(raise_for_status=True) as http:
        return await asyncio.gather(*(answer(http, *numbered) for numbered in enumerate(prompts)))


def _in_pages(page_tokens: int) -> int:
    """How many tokens of a first prompt are in complete pages."""
    return LONG // page_tokens * page_tokens


def _cached(answers: Sequence[Answer]) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


def _accepted(answers: Sequence[Answer]) -> list[tuple[list[int], int]]:
    """The tokens of each answer, and in how many verification steps they were accepted."""
    return [(answer["output_ids"], answer["meta_info"]["spec_verify_ct"]) for answer in answers]
