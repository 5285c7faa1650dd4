"""The `anthropic` SDK works with a gateway after changing its base URL only."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import MessageParam, ToolParam

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

KEY = "sk-ant-test"
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CONVERSATION: list[MessageParam] = [
    {"role": "user", "content": "How is it in Oslo?"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "clear"}]},
]
HELLO: list[MessageParam] = [{"role": "user", "content": "Hello! " * 60}]
STORY: list[MessageParam] = [{"role": "user", "content": "Tell me a story."}]


@dataclass(frozen=True)
class Clients:
    """The synchronous and the asynchronous client, created as an application does."""

    sync: anthropic.Anthropic
    asynchronous: anthropic.AsyncAnthropic
    base_url: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(
    engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Clients]:
    folder = tmp_path_factory.mktemp("anthropic")
    keys = folder / "keys"
    keys.write_text(f"one:{KEY}\n")
    async with LocalProcesses(folder) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]], {"auth": {"keysFile": str(keys)}})
        with anthropic.Anthropic(base_url=gateway.url, api_key=KEY) as sync:
            async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY) as asynchronous:
                yield Clients(sync, asynchronous, gateway.url)


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


@pytest.mark.parametrize(
    "headers", [{}, {"x-claude-code-session-id": "agent-1"}], ids=["by history", "by id"]
)
async def test_conversation_with_tool_calls_is_one_growing_session(
    clients: Clients, headers: dict[str, str]
) -> None:
    system = f"You are a weather desk {headers}."
    answers = [
        clients.sync.messages.with_raw_response.create(
            model=MODEL,
            messages=messages,
            system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
            tools=[WEATHER],
            max_tokens=6,
            extra_headers=headers,
        )
        for messages in (CONVERSATION[:1], CONVERSATION)
    ]
    lengths = [int(answer.headers["x-dps-prompt-tokens"]) for answer in answers]
    usages = [answer.parse().usage for answer in answers]
    assert lengths == [usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in usages]
    session = answers[0].headers["x-dps-session"]
    assert [
        {name: answer.headers[f"x-dps-{name}"] for name in ("history", "turn", "session", "delta-tokens")}
        for answer in answers
    ] == [
        {"history": "new", "turn": "1", "session": session, "delta-tokens": str(lengths[0])},
        {"history": "grown", "turn": "2", "session": session, "delta-tokens": str(lengths[1] - lengths[0])},
    ]


async def test_wrong_key_raises_authentication_error(clients: Clients) -> None:
    with (
        anthropic.Anthropic(base_url=clients.base_url, api_key="sk-unknown") as unauthorized,
        pytest.raises(anthropic.AuthenticationError, match="the API key is not valid"),
    ):
        unauthorized.messages.create(model=MODEL, messages=HELLO, max_tokens=6)


async def test_request_rejected_by_the_engine_raises_bad_request_error(clients: Clients) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be positive"):
        clients.sync.messages.create(model=MODEL, messages=HELLO, max_tokens=-1)
