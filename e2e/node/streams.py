"""A stream that is in progress when its engine is killed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from dps_local.stack import MODEL
from e2e.prefix_cache.sessions import WORDS

TOKENS = 4096
"""More than an engine on the CPU generates during a test."""
NEW_CHARS = 200
"""More than can be on its way to the client when an engine is killed."""


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

    async def continued(self, url: str, killed: asyncio.Event) -> None:
        """Read the stream at this base URL until its engine is killed and another one has continued it.

        Keeps the text of the killed engine: text is tokenized again for the continuation, which may then differ. Fails
        if the stream ends earlier, for example with an error event.
        """
        before: int | None = None
        async with aclosing(self._parts(url)) as parts:
            async for text in parts:
                self.text += text
                if self.text:
                    self.begun.set()
                if killed.is_set():
                    before = len(self.text) if before is None else before
                    if len(self.text) > before + NEW_CHARS:
                        self.text = self.text[:before]
                        return
        raise AssertionError("the stream was completed before its engine was killed")

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
