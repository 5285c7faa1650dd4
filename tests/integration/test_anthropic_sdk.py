"""The `anthropic` SDK works with a gateway after changing its base URL only."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import MessageParam

from dps_local.stack import MODEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello! " * 60}]
STORY: list[MessageParam] = [{"role": "user", "content": "Tell me a story."}]


@dataclass(frozen=True)
class Clients:
    """The synchronous and the asynchronous client, created as an application does."""

    sync: anthropic.Anthropic
    asynchronous: anthropic.AsyncAnthropic


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(keyed_gateway: tuple[str, str]) -> AsyncIterator[Clients]:
    url, key = keyed_gateway
    with anthropic.Anthropic(base_url=url, api_key=key) as sync:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as asynchronous:
            yield Clients(sync, asynchronous)


async def test_message_is_returned_by_both_clients(clients: Clients) -> None:
    answers = [
        clients.sync.messages.create(model=MODEL, messages=HELLO, max_tokens=6),
        await clients.asynchronous.messages.create(model=MODEL, messages=HELLO, max_tokens=6),
    ]
    counted = clients.sync.messages.count_tokens(model=MODEL, messages=HELLO)
    for answer in answers:
        assert (answer.role, [block.type for block in answer.content]) == ("assistant", ["text"])
        usage = answer.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


async def test_stream_helper_accumulates_the_message(clients: Clients) -> None:
    with clients.sync.messages.stream(model=MODEL, messages=STORY, max_tokens=6) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in final.content if block.type == "text"] == [text]
    assert text
    assert 0 < final.usage.output_tokens <= 6
