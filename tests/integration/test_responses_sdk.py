"""The `openai` SDK's Responses API works with a gateway after changing its base URL only."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseCompletedEvent, ResponseIncompleteEvent
from openai.types.responses.function_tool_param import FunctionToolParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

KEY = "sk-test"
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
CONVERSATION: list[ResponseInputItemParam] = [
    {"role": "user", "content": "How is it in Oslo?"},
    {
        "type": "function_call",
        "call_id": "call_1",
        "name": "get_weather",
        "arguments": '{"city": "Oslo"}',
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "clear"},
]


@dataclass(frozen=True)
class Clients:
    """The synchronous and the asynchronous client, created as an application does."""

    sync: openai.OpenAI
    asynchronous: openai.AsyncOpenAI


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(
    engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Clients]:
    folder = tmp_path_factory.mktemp("responses")
    keys = folder / "keys"
    keys.write_text(f"one:{KEY}\n")
    async with LocalProcesses(folder) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]], {"auth": {"keysFile": str(keys)}})
        url = f"{gateway.url}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as sync:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as asynchronous:
                yield Clients(sync, asynchronous)


def described(headers: Mapping[str, str]) -> dict[str, str]:
    """What the gateway says about the turn."""
    return {name: headers[f"x-dps-{name}"] for name in ("history", "turn", "session", "delta-tokens")}


async def test_response_is_returned_by_both_clients(clients: Clients) -> None:
    responses: list[Response] = [
        clients.sync.responses.create(model=MODEL, input="Hello!", max_output_tokens=8),
        await clients.asynchronous.responses.create(model=MODEL, input="Hello!", max_output_tokens=8),
    ]
    for response in responses:
        assert response.output_text
        assert response.usage is not None
        assert response.usage.input_tokens > 0


async def test_stream_ends_with_the_complete_response(clients: Clients) -> None:
    events = list(
        clients.sync.responses.create(model=MODEL, input="A story", max_output_tokens=8, stream=True)
    )
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.response.output_text == text
    assert last.response.usage is not None
    assert 0 < last.response.usage.output_tokens <= 8


@pytest.mark.parametrize("headers", [{}, {"session_id": "codex-1"}], ids=["by history", "by id"])
async def test_conversation_with_tool_calls_is_one_growing_session(
    clients: Clients, headers: dict[str, str]
) -> None:
    answers = [
        clients.sync.responses.with_raw_response.create(
            model=MODEL,
            input=items,
            instructions=f"You are a weather desk {headers}.",
            tools=[WEATHER],
            store=False,
            max_output_tokens=8,
            extra_headers=headers,
        )
        for items in (CONVERSATION[:1], CONVERSATION)
    ]
    lengths = [int(answer.headers["x-dps-prompt-tokens"]) for answer in answers]
    usages = [answer.parse().usage for answer in answers]
    assert lengths == [usage.input_tokens for usage in usages if usage is not None]
    session = answers[0].headers["x-dps-session"]
    assert [described(answer.headers) for answer in answers] == [
        {"history": "new", "turn": "1", "session": session, "delta-tokens": str(lengths[0])},
        {"history": "grown", "turn": "2", "session": session, "delta-tokens": str(lengths[1] - lengths[0])},
    ]


async def test_request_rejected_by_the_engine_raises_bad_request_error(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError, match="requires a tool"):
        clients.sync.responses.create(model=MODEL, input="Hello!", tool_choice="required")


async def test_id_chosen_by_the_client_is_refused(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError, match="the engine assigns the ids of responses"):
        clients.sync.responses.create(model=MODEL, input="Hello!", extra_body={"request_id": "resp_1"})
