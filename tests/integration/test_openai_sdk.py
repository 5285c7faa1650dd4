"""The `openai` SDK works with a gateway after changing its base URL only."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

KEY = "sk-test-of-tenant-one"

TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
SIX_TOKENS: dict[str, Any] = {"max_tokens": 6, "extra_body": {"ignore_eos": True}}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello! " * 60}]
WITH_TOOL_RESULT: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are a weather desk."},
    {"role": "user", "content": "How is it in Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": '{"sky": "clear"}'},
]


@dataclass(frozen=True)
class Clients:
    """The synchronous and the asynchronous client, created as an application does."""

    sync: openai.OpenAI
    asynchronous: openai.AsyncOpenAI
    base_url: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(
    engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Clients]:
    folder: Path = tmp_path_factory.mktemp("sdk")
    keys = folder / "keys"
    keys.write_text(f"one:{KEY}\n")
    async with LocalProcesses(folder) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]], {"auth": {"keysFile": str(keys)}})
        url = f"{gateway.url}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY) as sync:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as asynchronous:
                yield Clients(sync, asynchronous, url)


async def test_non_streaming_completion_is_returned_by_both_clients(clients: Clients) -> None:
    answers = [
        clients.sync.chat.completions.create(model=MODEL, messages=HELLO, **SIX_TOKENS),
        await clients.asynchronous.chat.completions.create(model=MODEL, messages=HELLO, **SIX_TOKENS),
    ]
    for answer in answers:
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answers[0].choices == answers[1].choices


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


async def test_conversation_with_tool_calls_is_one_growing_session(clients: Clients) -> None:
    def send(messages: list[ChatCompletionMessageParam]) -> Any:
        return clients.sync.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="auto", max_tokens=6
        )

    first, second = send(WITH_TOOL_RESULT[:2]), send(WITH_TOOL_RESULT)
    decisions = [
        {name: answer.headers[f"x-dps-{name}"] for name in ("history", "turn", "session", "delta-tokens")}
        for answer in (first, second)
    ]
    lengths = [int(answer.headers["x-dps-prompt-tokens"]) for answer in (first, second)]
    assert lengths == [answer.parse().usage.prompt_tokens for answer in (first, second)]
    session = decisions[0]["session"]
    assert decisions == [
        {"history": "new", "turn": "1", "session": session, "delta-tokens": str(lengths[0])},
        {"history": "grown", "turn": "2", "session": session, "delta-tokens": str(lengths[1] - lengths[0])},
    ]


async def test_stream_helper_and_completions_endpoint_work(clients: Clients) -> None:
    with clients.sync.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].finish_reason == "stop"
    completion = await clients.asynchronous.completions.create(model=MODEL, prompt="Once", **SIX_TOKENS)
    chunks = [
        part.choices[0].text
        for part in clients.sync.completions.create(model=MODEL, prompt="Once", **SIX_TOKENS, stream=True)
    ]
    assert "".join(chunks) == completion.choices[0].text != ""


async def test_models_are_listed(clients: Clients) -> None:
    assert [model.id for model in clients.sync.models.list()] == [MODEL]
    assert [model.id async for model in clients.asynchronous.models.list()] == [MODEL]
    assert clients.sync.models.retrieve(MODEL).id == MODEL


async def test_wrong_key_raises_authentication_error(clients: Clients) -> None:
    with (
        openai.OpenAI(base_url=clients.base_url, api_key="sk-unknown") as unauthorized,
        pytest.raises(openai.AuthenticationError) as error,
    ):
        unauthorized.chat.completions.create(model=MODEL, messages=HELLO)
    assert (error.value.status_code, error.value.code) == (401, "invalid_api_key")


async def test_request_rejected_by_the_engine_raises_bad_request_error(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError, match=r"max_new_tokens"):
        clients.sync.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=-1)
    with pytest.raises(openai.BadRequestError):
        await clients.asynchronous.chat.completions.create(model=MODEL, messages=[])


async def test_body_that_is_not_an_object_raises_bad_request_error(clients: Clients) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        clients.sync.post("/chat/completions", body=[1, 2], cast_to=object)
    assert error.value.code == "bad_request"
