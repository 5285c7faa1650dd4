"""Concurrent sessions of chats, and the tokens that their turns add to the common prefix cache."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_local.stack import MODEL
from dps_testkit.http import metric
from dps_testkit.waiting import wait_until

ANSWER_TOKENS = 16
SETTLED_SECONDS = 1.0
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "red",
    "mat",
    "and",
    "saw",
    "two",
    "old",
    "dogs",
    "run",
    "past",
    "here",
)


@dataclass(frozen=True)
class Turn:
    """An answer, the pool that served it (empty without a gateway), and the engine's token counts."""

    text: str
    pool: str
    prompt_tokens: int
    cached_tokens: int

    def new_tokens(self, page_tokens: int) -> int:
        """The tokens of complete pages that the engine did not have. The KV of the last token is not computed."""
        known = self.prompt_tokens + ANSWER_TOKENS - 1
        return known // page_tokens * page_tokens - self.cached_tokens


@dataclass
class Session:
    """A chat that asks questions of these lengths in words. Sessions with different salts share no pages."""

    number: int
    salt: str
    stream: bool
    lengths: Sequence[int]
    turns: list[Turn] = field(default_factory=list)
    _history: list[ChatCompletionMessageParam] = field(default_factory=list)

    async def ask(self, client: AsyncOpenAI) -> None:
        """Play the next turn. Raises the errors of the OpenAI client, which include error events of streams."""
        self._history.append(self._question())
        turn = await self._answer(client, self._request(self._history))
        self.turns.append(turn)
        self._history.append({"role": "assistant", "content": turn.text})

    async def abandon(self, client: AsyncOpenAI, seconds: float) -> None:
        """Send the request of the next turn, and close the connection after so many seconds. No turn is played."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._answer(client, self._request([*self._history, self._question()]))

    def _question(self) -> ChatCompletionMessageParam:
        words = random.Random(f"{self.number} {len(self.turns)}")
        question = " ".join(words.choices(WORDS, k=self.lengths[len(self.turns)]))
        return {"role": "user", "content": question}

    def _request(self, messages: Sequence[ChatCompletionMessageParam]) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "cache_salt": f"{self.salt} {self.number}"},
            "extra_headers": {"x-session-id": f"{self.salt} {self.number}"},
        }

    async def _answer(self, client: AsyncOpenAI, request: Mapping[str, Any]) -> Turn:
        return await (_streamed if self.stream else _whole)(client, request)


async def _whole(client: AsyncOpenAI, request: Mapping[str, Any]) -> Turn:
    response = await client.chat.completions.with_raw_response.create(**request)
    answer = response.parse()
    return _turn(answer.choices[0].message.content or "", response.headers, answer.usage)


async def _streamed(client: AsyncOpenAI, request: Mapping[str, Any]) -> Turn:
    response = await client.chat.completions.with_raw_response.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in response.parse():
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return _turn(text, response.headers, usage)


def _turn(text: str, headers: Mapping[str, str], usage: Any) -> Turn:
    assert usage.completion_tokens == ANSWER_TOKENS
    cached = usage.prompt_tokens_details.cached_tokens
    return Turn(text, headers.get("x-dps-pool", ""), usage.prompt_tokens, cached)


async def play(
    sessions: Sequence[Session], url: str, engines: Mapping[str, str], page_tokens: int = PAGE_TOKENS
) -> None:
    """Play all turns at this base URL, the sessions concurrently.

    engines: the URL of each pool's engine; the name of a pool is empty if there is no gateway. Each turn begins when
    all pages of the previous one are stored by these engines.
    """
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for _ in sessions[0].lengths:
            expected = Counter({pool: await stored_tokens(engine) for pool, engine in engines.items()})
            await asyncio.gather(*(session.ask(client) for session in sessions))
            for session in sessions:
                turn = session.turns[-1]
                expected[turn.pool] += turn.new_tokens(page_tokens)
            for pool, engine in engines.items():
                await until_stored(engine, expected[pool])


async def stored_tokens(engine: str) -> float:
    """The tokens that the engine at this URL has written to the storage."""
    return await metric(engine, "sglang:backuped_tokens_total")


async def settled_tokens(engine: str) -> float:
    """The tokens that the engine has written to the storage, once it has written those of all earlier requests."""
    before, now = -1.0, await stored_tokens(engine)
    while now != before:
        await asyncio.sleep(SETTLED_SECONDS)
        before, now = now, await stored_tokens(engine)
    return now


async def until_stored(engine: str, tokens: float) -> None:
    """Wait until the engine at this URL has written this many tokens since it started."""

    async def stored() -> bool:
        return await stored_tokens(engine) >= tokens

    await wait_until(stored, f"{engine} has stored {tokens:.0f} tokens")
