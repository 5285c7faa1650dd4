"""An agent of the OpenAI Agents SDK works with a gateway after changing the base URL of its client only."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from agents import Agent, OpenAIResponsesModel, Runner, SQLiteSession, function_tool
from agents import set_tracing_disabled as set_agents_tracing_disabled
from httpx2 import AsyncClient, Headers, Response

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@dataclass
class Requester:
    """An agent, and the headers of the gateway's responses to it."""

    agent: Agent
    responses: list[Headers] = field(default_factory=list)


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"{city} is sunny."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def requester(
    engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Requester]:
    set_agents_tracing_disabled(True)  # it sends traces to OpenAI
    responses: list[Headers] = []

    async def record(response: Response) -> None:
        responses.append(response.headers)

    async with (
        LocalProcesses(tmp_path_factory.mktemp("agents")) as processes,
        AsyncClient(event_hooks={"response": [record]}) as http,
    ):
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        client = openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=http
        )
        agent = Agent(
            name="desk",
            instructions="You are a weather desk.",
            tools=[get_weather],
            model=OpenAIResponsesModel(model=MODEL, openai_client=client),
        )
        yield Requester(agent, responses)


async def test_turns_of_an_agent_are_one_growing_session(requester: Requester, tmp_path: Path) -> None:
    memory = SQLiteSession("conversation", tmp_path / "agents.db")
    for question in ("How is it in Oslo?", "And in Bergen?"):
        result = await Runner.run(requester.agent, question, session=memory)
        assert result.final_output
    stream = Runner.run_streamed(requester.agent, "And in Tromsø?", session=memory)
    async for _ in stream.stream_events():
        pass
    assert stream.final_output
    memory.close()
    lengths = [0, *(int(headers["x-dps-prompt-tokens"]) for headers in requester.responses)]
    names = ("history", "turn", "session", "delta-tokens")
    session = requester.responses[0]["x-dps-session"]
    assert [tuple(headers[f"x-dps-{name}"] for name in names) for headers in requester.responses] == [
        ("new" if turn == 1 else "grown", str(turn), session, str(lengths[turn] - lengths[turn - 1]))
        for turn in (1, 2, 3)
    ]
