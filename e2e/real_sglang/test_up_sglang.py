"""`dps up --engine sglang` with SGLang on the CPU: turns are routed and counted, and all processes are stopped."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, SQLiteSession
from agents import set_tracing_disabled as set_agents_tracing_disabled
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam
from httpx2 import AsyncClient, Headers, Response
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from dps_engines.pools import POOLS as ENGINE_POOLS
from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_local.processes import free_ports
from dps_testkit.waiting import eventually_async
from e2e.broken_streams import GENERATE, REQUESTS, check_continued
from e2e.prefix_cache import hicache, mooncake
from e2e.prefix_cache.sessions import stored_tokens, until_stored
from e2e.real_sglang.chat_turns import Turn, send
from e2e.real_sglang.local_sglang import PYTHON, install, tiny_model
from e2e.real_sglang.prompts import PromptCase, prompt_cases, reported_prompt_tokens

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

DPS = Path(__file__).parents[2] / ".venv/bin/dps"
LOAD_SECONDS = 900.0
"""Time limit for loading two engines on a busy machine; an idle one with two cores needs half a minute."""
END_SECONDS = 120.0
CONCURRENT_REQUESTS = 16

ATTEMPTS = 3
LONG = "Every word of this is prefilled by one engine and not by the other. " * 12
SHORT = "And then?"
ANSWER_TOKENS = 12
POOLS = ["greedy", "speculative", "speculative", "greedy", "speculative"]
QUESTIONS = [SHORT, SHORT, SHORT, LONG, SHORT]


@dataclass(frozen=True)
class Up:
    """A running `dps up`."""

    process: asyncio.subprocess.Process
    output: Path

    def printed(self, label: str) -> str:
        """The URL or path printed after a label."""
        found = re.search(rf"\b{label}:? ((?:http|/)[^\s)]+)", self.output.read_text())
        assert found is not None, self.output.read_text()
        return found[1]

    def server(self, label: str) -> str:
        """The base URL of a server, without /v1."""
        return self.printed(label).removesuffix("/v1")

    def folder_exists(self) -> bool:
        """Whether the folder that `dps up` created still exists."""
        return Path(self.printed("logs")).exists()

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"timed out after {seconds:.0f} s\n{self.output.read_text()}"
            await asyncio.sleep(0.1)

    def serves(self) -> bool:
        assert self.process.returncode is None, self.output.read_text()
        return "Press Ctrl-C to stop." in self.output.read_text()


@asynccontextmanager
async def dps_up(folder: Path, *arguments: str, python_path: str = "") -> AsyncIterator[Up]:
    """Run `dps up` and interrupt it on exit; no process and no folder may remain.

    python_path: precedes the PYTHONPATH.
    """
    (port,) = free_ports(1)
    output = folder / "up.log"
    with output.open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(str(DPS), "up", "--port", str(port), "--threshold", "64", *arguments),
            env=os.environ | {"PYTHONPATH": f"{python_path}:{os.environ.get('PYTHONPATH', '')}".strip(":")},
            stdout=log,
            stderr=log,
        )
    up = Up(process, output)
    try:
        yield up
    finally:
        started = descendants(process.pid)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        status = await asyncio.wait_for(process.wait(), END_SECONDS)
    assert status == 128 + signal.SIGINT
    await up.until(lambda: not any(map(runs, started)), END_SECONDS)
    assert not up.folder_exists()


def descendants(pid: int) -> list[int]:
    """The ids of all descendant processes."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # the process has exited
        return []
    return [item for child in children for item in (child, *descendants(child))]


def runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def sglang() -> list[str]:
    """The arguments of `dps up` that start SGLang."""
    install()
    model = str(tiny_model())
    engine = ["--engine", "sglang", "--engine-python", str(PYTHON)]
    return [*engine, "--model", model, "--draft-model", model, "--", "--enable-response-store"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(sglang: list[str], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    async with dps_up(tmp_path_factory.mktemp("up"), *sglang) as stack:
        await stack.until(stack.serves, LOAD_SECONDS)
        # On a busy machine, the first request to an engine can fail although its health check has succeeded.
        async with aiohttp.ClientSession() as http:
            for engine in ("speculative engine", "greedy engine"):
                await eventually_async(partial(generate, http, stack.server(engine)), END_SECONDS)
        yield stack


async def generate(http: aiohttp.ClientSession, engine: str) -> None:
    """Let an engine generate one token. Its prompt has no prefix in common with chats."""
    body = {"text": "warm up", "sampling_params": {"max_new_tokens": 1}}
    async with http.post(f"{engine}/generate", json=body) as answer:
        assert answer.status == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def turns(up: Up) -> list[Turn]:
    """The turns of a session that uses both pools."""
    history: list[ChatCompletionMessageParam] = [{"role": "system", "content": LONG}]
    played: list[Turn] = []
    async with AsyncOpenAI(base_url=up.printed("gateway"), api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            played.append(await send(client, model, history, ANSWER_TOKENS))
            history.append(played[-1].message)
    return played


async def test_prompt_lengths_equal_those_of_sglang_and_turns_are_routed_by_growth(turns: list[Turn]) -> None:
    lengths = [0, *(turn.prompt_tokens for turn in turns)]
    assert [turn.headers for turn in turns] == [
        {
            "x-dps-pool": pool,
            "x-dps-reason": "over_threshold" if pool == "greedy" else "within_threshold",
            "x-dps-prompt-tokens": str(lengths[number]),
            "x-dps-delta-tokens": str(lengths[number] - lengths[number - 1]),
            "x-dps-turn": str(number),
            "x-dps-session": turns[0].headers["x-dps-session"],
            "x-dps-state": "redis",
            "x-dps-history": "new" if number == 1 else "grown",
        }
        for number, pool in enumerate(POOLS, start=1)
    ]


async def test_each_engine_has_cached_the_session_up_to_its_last_turn(
    turns: list[Turn],
) -> None:
    lengths, cached = [turn.prompt_tokens for turn in turns], [turn.cached_tokens for turn in turns]
    assert cached[:2] == [0, 0]
    assert lengths[1] <= cached[2] < lengths[2]
    assert lengths[0] <= cached[3] < lengths[1]
    assert lengths[2] <= cached[4] < lengths[3]


async def test_anthropic_conversation_grows_by_the_tokens_that_sglang_counts(up: Up) -> None:
    conversation: list[MessageParam] = [{"role": "user", "content": LONG}]
    headers, lengths = [], []
    async with AsyncAnthropic(base_url=up.server("gateway"), api_key="none") as client:
        for question in (SHORT, LONG):
            async with client.messages.stream(
                model="default", messages=conversation, system="Be terse.", max_tokens=ANSWER_TOKENS
            ) as stream:
                answer = await stream.get_final_message()
                headers.append(stream.response.headers)
            lengths.append(answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0))
            conversation += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": question},
            ]
    assert [
        (item["x-dps-history"], int(item["x-dps-prompt-tokens"]), int(item["x-dps-delta-tokens"]))
        for item in headers
    ] == [("new", lengths[0], lengths[0]), ("grown", lengths[1], lengths[1] - lengths[0])]


async def test_stored_response_is_continued_by_the_engine_that_holds_it(up: Up) -> None:
    turns = []
    async with AsyncOpenAI(base_url=up.printed("gateway"), api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        previous: str | None = None
        for text in (LONG, SHORT, SHORT):
            answer = await client.responses.with_raw_response.create(
                model=model,
                input=text,
                previous_response_id=previous,
                max_output_tokens=ANSWER_TOKENS,
                temperature=0,
            )
            response = answer.parse()
            assert response.usage is not None
            previous = response.id
            turns.append((answer.headers, response.usage.input_tokens))
    assert [
        tuple(headers[f"x-dps-{name}"] for name in ("history", "pool", "reason")) for headers, _ in turns
    ] == [
        ("new", "greedy", "over_threshold"),
        ("grown", "greedy", "fixed"),
        ("grown", "greedy", "fixed"),
    ]
    # The tiny model's answers are random tokens, whose text may be tokenized differently in the next prompt.
    counted = [int(headers["x-dps-prompt-tokens"]) for headers, _ in turns]
    assert counted == pytest.approx([length for _, length in turns], abs=ANSWER_TOKENS)
    assert counted[0] == turns[0][1]


async def test_turns_of_an_agent_grow_by_the_tokens_that_sglang_counts(up: Up, tmp_path: Path) -> None:
    set_agents_tracing_disabled(True)  # it sends traces to OpenAI
    headers: list[Headers] = []

    async def record(response: Response) -> None:
        if response.request.method == "POST":
            headers.append(response.headers)

    async with AsyncClient(event_hooks={"response": [record]}, timeout=None) as http:
        client = AsyncOpenAI(base_url=up.printed("gateway"), api_key="none", max_retries=0, http_client=http)
        model = (await client.models.list()).data[0].id
        agent = Agent(
            name="desk",
            instructions=f"You are a weather desk. {LONG}",
            model=OpenAIResponsesModel(model=model, openai_client=client),
            # The SDK accepts complete answers only. The tiny model's random tokens soon contain a rare letter.
            model_settings=ModelSettings(max_tokens=1000, temperature=1, extra_body={"stop": ["q", "z"]}),
        )
        memory = SQLiteSession("conversation", tmp_path / "agents.db")
        lengths = []
        for question in (SHORT, SHORT):
            result = await Runner.run(agent, question, session=memory)
            lengths.append(result.raw_responses[-1].usage.input_tokens)
        memory.close()
    assert [
        (item["x-dps-history"], int(item["x-dps-prompt-tokens"]), int(item["x-dps-delta-tokens"]))
        for item in headers
    ] == [("new", lengths[0], lengths[0]), ("grown", lengths[1], lengths[1] - lengths[0])]


async def counted(http: aiohttp.ClientSession, case: PromptCase) -> tuple[str, str | None, int] | None:
    """The prompt lengths of the gateway and of the engine. None if the engine rejects the request."""
    async with http.post(case.path, json={**case.body, "model": str(tiny_model())}) as answer:
        body = await answer.read()
    if answer.status in (400, 500):
        return None
    assert answer.status == 200, case.name
    return case.name, answer.headers.get("x-dps-prompt-tokens"), reported_prompt_tokens(case, body)


async def test_prompt_lengths_of_every_kind_of_request_equal_those_of_sglang(up: Up) -> None:
    connector = aiohttp.TCPConnector(limit=CONCURRENT_REQUESTS)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(up.server("gateway"), connector=connector, timeout=timeout) as http:
        found = await asyncio.gather(*(counted(http, case) for case in prompt_cases()))
    lengths = [each for each in found if each is not None]
    assert [each for each in lengths if each[1] != str(each[2])] == []
    assert len(lengths) > 250


async def test_streams_that_break_off_are_continued_by_the_other_engine(up: Up) -> None:
    urls = {pool: up.printed(f"{pool} engine") for pool in ENGINE_POOLS}
    await check_continued(urls, tiny_model(), REQUESTS | GENERATE)


@mooncake.INSTALLABLE
async def test_engines_with_a_common_prefix_cache_read_each_others_pages(
    sglang: list[str], tmp_path: Path
) -> None:
    """A busy machine may exceed SGLang's time limit for a fetch, so the first attempt may fail."""
    hicache.install()
    mooncake.install()
    common = ("--prefix-cache", "common")
    async with dps_up(tmp_path, *common, *sglang, python_path=str(mooncake.PACKAGE)) as up:
        await up.until(up.serves, LOAD_SECONDS)
        greedy = up.printed("greedy engine")
        async with AsyncOpenAI(base_url=up.printed("gateway"), api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            for attempt in range(ATTEMPTS):
                question: ChatCompletionMessageParam = {"role": "user", "content": SHORT}
                before = await stored_tokens(greedy)
                prompt: list[ChatCompletionMessageParam] = [
                    {"role": "system", "content": f"{attempt} {LONG * 4}"},
                    question,
                ]
                first = await send(client, model, prompt, ANSWER_TOKENS)
                await until_stored(greedy, before + first.prompt_tokens - PAGE_TOKENS)
                second = await send(client, model, [*prompt, first.message, question], ANSWER_TOKENS)
                if second.cached_tokens:
                    break
    assert [turn.headers["x-dps-pool"] for turn in (first, second)] == ["greedy", "speculative"]
    assert first.prompt_tokens - PAGE_TOKENS <= second.cached_tokens < second.prompt_tokens


async def test_interrupt_while_models_load_leaves_no_process(sglang: list[str], tmp_path: Path) -> None:
    async with dps_up(tmp_path, *sglang) as up:
        # Until they have loaded the model, SGLang's child processes do not notice that their parent has exited.
        await up.until(lambda: len(descendants(up.process.pid)) >= 6, LOAD_SECONDS)
