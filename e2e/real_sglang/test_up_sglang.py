"""`dps up --engine sglang` with SGLang on the CPU: turns are routed and counted, and all processes are stopped."""

import asyncio
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, SQLiteSession
from agents import set_tracing_disabled as set_agents_tracing_disabled
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam
from httpx2 import AsyncClient, Headers, Response
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputParam

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_gateway.pool import Pool
from dps_lab.calibrate.live import measure_engines
from dps_lab.calibrate.measure import Plan
from dps_local.processes import free_ports
from dps_testkit.api_checkers import COMPATCANARY, FORMATS, comply, scan
from dps_testkit.http import metric
from e2e.prefix_cache import hicache
from e2e.prefix_cache.sessions import stored_tokens, until_stored
from e2e.real_sglang.chat_turns import Turn, send
from e2e.real_sglang.check_lengths import CORRECT, check_all
from e2e.real_sglang.local_sglang import PYTHON, install, tiny_model
from e2e.real_sglang.prompts import prompt_cases
from e2e.real_sglang.short_answers import short_answers

T = TypeVar("T")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

DPS = Path(__file__).parents[2] / ".venv/bin/dps"
LOAD_SECONDS = 900.0
"""Time limit for loading two engines on a busy machine; an idle one with two cores needs half a minute."""
END_SECONDS = 120.0

ATTEMPTS = 3
LONG = "Every word of this is prefilled by one engine and not by the other. " * 12
SHORT = "And then?"
ANSWER_TOKENS = 12
FEW_REQUESTS = Plan(prompt_words=(50, 2000), repeats=2, batches=(1, 4), waves=1, answer_tokens=32)
"""What `dps calibrate` sends to an engine takes minutes on a CPU that others use too."""
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
async def dps_up(folder: Path, *arguments: str) -> AsyncIterator[Up]:
    """Run `dps up` and interrupt it on exit; no process and no folder may remain."""
    (port,) = free_ports(1)
    output = folder / "up.log"
    with output.open("w") as log:
        process = await asyncio.create_subprocess_exec(
            DPS, "up", "--port", str(port), "--threshold", "64", *arguments, stdout=log, stderr=log
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
        yield stack


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


async def test_gateway_records_cached_tokens(up: Up, turns: list[Turn]) -> None:
    recorded = {
        pool: await metric(up.printed("admin"), "dps_cached_tokens_total", pool=pool) for pool in set(POOLS)
    }
    assert recorded == {
        pool: sum(turn.cached_tokens for turn, item in zip(turns, POOLS, strict=True) if item == pool)
        for pool in set(POOLS)
    }


@pytest.mark.usefixtures("turns")
async def test_only_the_speculative_engine_verifies_drafts(up: Up) -> None:
    verified = {
        pool: await metric(up.printed(f"{pool} engine"), "sglang:spec_verify_calls_total")
        for pool in ("speculative", "greedy")
    }
    assert verified["speculative"] > 0
    assert verified["greedy"] == 0


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


async def test_conversation_without_stored_responses_is_routed_by_growth(up: Up) -> None:
    conversation: ResponseInputParam = [{"role": "user", "content": f"Nothing is stored. {LONG}"}]
    turns = []
    async with AsyncOpenAI(base_url=up.printed("gateway"), api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        for _ in range(2):
            answer = await client.responses.with_raw_response.create(
                model=model, input=conversation, store=False, max_output_tokens=ANSWER_TOKENS, temperature=0
            )
            response = answer.parse()
            assert response.usage is not None
            decision = tuple(answer.headers[f"x-dps-{name}"] for name in ("pool", "history", "prompt-tokens"))
            turns.append((decision, response.usage.input_tokens))
            conversation += [
                {"role": "assistant", "content": response.output_text},
                {"role": "user", "content": SHORT},
            ]
    assert [decision for decision, _ in turns] == [
        ("greedy", "new", str(turns[0][1])),
        ("speculative", "grown", str(turns[1][1])),
    ]


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


async def test_prompt_lengths_of_every_kind_of_request_equal_those_of_sglang(up: Up) -> None:
    checks = await check_all(up.server("gateway"), prompt_cases(), str(tiny_model()))
    assert [each for each in checks if each.verdict not in CORRECT] == []
    assert Counter(each.verdict for each in checks)["equal"] > 250


async def directly_and_routed(up: Up, check: Callable[[str], Awaitable[T]]) -> list[T]:
    """The results of a check of the greedy engine and of the gateway. Their answers are short."""
    results = []
    for name in ("greedy engine", "gateway"):
        async with short_answers(up.server(name)) as url:
            results.append(await check(url))
    return results


@pytest.mark.parametrize("form", FORMATS)
async def test_llm_comply_fails_no_check_only_because_of_the_gateway(up: Up, form: str) -> None:
    direct, routed = await directly_and_routed(up, lambda url: comply(url, str(tiny_model()), form))
    passed = {name for name, status in direct.items() if status == "passed"}
    assert passed
    assert {name for name in passed if routed[name] != "passed"} == set()


@pytest.mark.skipif(shutil.which("npx") is None, reason="npx is needed to run CompatCanary")
async def test_compatcanary_fails_no_check_only_because_of_the_gateway(up: Up, tmp_path: Path) -> None:
    direct, routed = await directly_and_routed(up, lambda url: scan(url, str(tiny_model()), tmp_path))
    if direct is None or routed is None:
        pytest.skip(f"npx cannot run {COMPATCANARY}")
    passed = {name for name, status in direct.items() if status == "PASS"}
    assert passed
    assert {name for name in passed if routed[name] == "FAIL"} == set()


async def test_calibration_measures_both_engines(up: Up) -> None:
    urls = {pool: [up.printed(f"{pool} engine")] for pool in Pool}
    measured = await measure_engines(urls, None, FEW_REQUESTS)
    for engine in measured.values():
        assert not engine.serialized
        assert engine.passes.prefill_seconds_per_token > 0
        assert engine.passes.decode_base_seconds + engine.passes.decode_seconds_per_request > 0
    # SGLang sends a character that consists of several tokens in one part.
    assert measured[Pool.GREEDY].acceptance_length == pytest.approx(1.0, abs=0.05)
    assert measured[Pool.SPECULATIVE].acceptance_length > 1.2


async def test_second_stack_detects_the_model_of_running_engines(up: Up, tmp_path: Path) -> None:
    urls = [
        "--speculative-url",
        up.printed("speculative engine"),
        "--greedy-url",
        up.printed("greedy engine"),
    ]
    async with dps_up(tmp_path, *urls) as another:
        await another.until(another.serves, LOAD_SECONDS)
        async with AsyncOpenAI(base_url=another.printed("gateway"), api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            turn = await send(client, model, [{"role": "user", "content": SHORT}], ANSWER_TOKENS)
    assert model == str(tiny_model())
    decision = {name: turn.headers[name] for name in ("x-dps-pool", "x-dps-prompt-tokens", "x-dps-history")}
    assert decision == {
        "x-dps-pool": "speculative",
        "x-dps-prompt-tokens": str(turn.prompt_tokens),
        "x-dps-history": "new",
    }


async def test_engines_with_a_common_prefix_cache_read_each_others_pages(
    sglang: list[str], tmp_path: Path
) -> None:
    """A busy machine may exceed SGLang's time limit for a fetch, so the first attempt may fail."""
    hicache.install()
    async with dps_up(tmp_path, "--prefix-cache", "common", *sglang) as up:
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
