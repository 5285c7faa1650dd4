"""The `openai` SDK works with a gateway after changing its base URL only."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from dps_local.stack import MODEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SIX_TOKENS: dict[str, Any] = {"max_tokens": 6, "extra_body": {"ignore_eos": True}}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello! " * 60}]


@dataclass(frozen=True)
class Clients:
    """The synchronous and the asynchronous client, created as an application does."""

    sync: openai.OpenAI
    asynchronous: openai.AsyncOpenAI


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(keyed_gateway: tuple[str, str]) -> AsyncIterator[Clients]:
    url, key = keyed_gateway
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as sync:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as asynchronous:
            yield Clients(sync, asynchronous)


@pytest.mark.parametrize("include_usage", [True, False], ids=["with-usage", "without-usage"])
async def test_stream_has_usage_only_if_requested(clients: Clients, include_usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "stream": True, **SIX_TOKENS, **options}
    chunks = list(clients.sync.chat.completions.create(**request))
    async_chunks = [chunk async for chunk in await clients.asynchronous.chat.completions.create(**request)]

    for stream in (chunks, async_chunks):
        *content, last = stream
        assert all(chunk.usage is None for chunk in content)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in content if chunk.choices)
        assert (last.usage is not None, last.choices == []) == (include_usage, include_usage)


async def test_stream_helper_and_completions_endpoint_work(clients: Clients) -> None:
    with clients.sync.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].finish_reason == "stop"
    completion = await clients.asynchronous.completions.create(model=MODEL, prompt="Once", **SIX_TOKENS)
    chunks = [
        part.choices[0].text
        for part in clients.sync.completions.create(model=MODEL, prompt="Once", **SIX_TOKENS, stream=True)
    ]
    assert "".join(chunks) == completion.choices[0].text != ""
