"""A stream that is in progress when its engine is killed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from openai import APIError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from dps_local.stack import MODEL
from e2e.prefix_cache.sessions import WORDS

TOKENS = 4096
"""More than an engine on the CPU generates during a test."""


class LongStream:
    """A streamed answer that does not end during a test. `words` is the number of words in the question.

    text: the part that has been received. begun: set when the first part arrives. pool: the engine's pool.
    """

    def __init__(self, name: str, words: int) -> None:
        self.text = ""
        self.begun = asyncio.Event()
        self.pool = ""
        self._name = name
        self._words = words

    async def interrupted(self, url: str) -> None:
        """Read the stream at this base URL until it ends with an error event. Fails if it ends otherwise."""
        try:
            async for text in self._parts(url):
                self.text += text
                if self.text:
                    self.begun.set()
        except APIError:
            assert self.begun.is_set(), "the request failed before the stream had begun"
        else:
            raise AssertionError("the stream was completed")

    async def check(self, url: str) -> None:
        """Assert that the answer of the engine at this base URL begins with the received text."""
        answer = ""
        async with aclosing(self._parts(url)) as parts:
            async for text in parts:
                answer += text
                if len(answer) >= len(self.text):
                    break
        assert answer.startswith(self.text)

    async def _parts(self, url: str) -> AsyncGenerator[str, None]:
        question = " ".join(WORDS[number % len(WORDS)] for number in range(self._words))
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            response = await client.chat.completions.with_raw_response.create(
                model=MODEL,
                messages=messages,
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "cache_salt": self._name},
                extra_headers={"x-session-id": self._name},
            )
            self.pool = response.headers.get("x-dps-pool", "")
            async with response.parse() as chunks:
                async for chunk in chunks:
                    yield "".join(choice.delta.content or "" for choice in chunk.choices)
