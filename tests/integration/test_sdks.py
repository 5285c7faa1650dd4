"""The `openai` and the `anthropic` SDK work with a gateway after changing their base URL only."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent

from dps_local.stack import MODEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SIX_TOKENS: dict[str, Any] = {"max_tokens": 6, "extra_body": {"ignore_eos": True}}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello! " * 60}]
STORY: list[MessageParam] = [{"role": "user", "content": "Tell me a story. " * 20}]


@pytest.fixture
def client(keyed_gateway: tuple[str, str]) -> Iterator[openai.OpenAI]:
    """A client, created as an application does."""
    url, key = keyed_gateway
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as created:
        yield created


@pytest.fixture
def claude(keyed_gateway: tuple[str, str]) -> Iterator[anthropic.Anthropic]:
    url, key = keyed_gateway
    with anthropic.Anthropic(base_url=url, api_key=key) as created:
        yield created


@pytest.mark.parametrize("include_usage", [True, False], ids=["with-usage", "without-usage"])
async def test_stream_has_usage_only_if_requested(client: openai.OpenAI, include_usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "stream": True, **SIX_TOKENS, **options}
    *content, last = client.chat.completions.create(**request)
    assert all(chunk.usage is None for chunk in content)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content if chunk.choices)
    assert (last.usage is not None, last.choices == []) == (include_usage, include_usage)


async def test_stream_helper_and_completions_endpoint_work(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].finish_reason == "stop"
    completion = client.completions.create(model=MODEL, prompt="Once", **SIX_TOKENS)
    parts = client.completions.create(model=MODEL, prompt="Once", **SIX_TOKENS, stream=True)
    assert "".join(part.choices[0].text for part in parts) == completion.choices[0].text != ""


async def test_stream_ends_with_the_complete_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="A story", max_output_tokens=8, stream=True))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.response.output_text == text
    assert last.response.usage is not None
    assert 0 < last.response.usage.output_tokens <= 8


async def test_response_id_chosen_by_the_client_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the engine assigns the ids of responses"):
        client.responses.create(model=MODEL, input="Hello!", extra_body={"request_id": "resp_1"})


async def test_message_has_as_many_input_tokens_as_are_counted(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model=MODEL, messages=STORY, max_tokens=6)
    counted = claude.messages.count_tokens(model=MODEL, messages=STORY)
    assert (message.role, [block.type for block in message.content]) == ("assistant", ["text"])
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens


async def test_stream_helper_accumulates_the_message(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL, messages=STORY, max_tokens=6) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in final.content if block.type == "text"] == [text]
    assert text
    assert 0 < final.usage.output_tokens <= 6
