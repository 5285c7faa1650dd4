"""What SGLang answers when its queue is full and when it aborts a request, and prompts that change at the front."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
import pytest_asyncio
from anthropic.types import MessageParam, TextBlockParam

from dps_gateway.api.outcome import failure_of
from dps_local.processes import Child, free_ports
from dps_local.stack import MODEL
from dps_testkit.engine_contract.exchange import recorded
from dps_testkit.engine_contract.refusals import LIMITS, abort, has, others, refusals
from dps_testkit.http import status_of
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from e2e.real_sglang.local_sglang import HERE, install, tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]

LOAD_SECONDS = 900.0
STOP_SECONDS = 30.0
SOME = 100
"""The tokens of an answer that takes seconds."""
QUESTION = [{"role": "user", "content": "Tell me a story."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "ignore_eos": True},
    "/v1/completions": {"model": MODEL, "prompt": "Once", "max_tokens": 8, "ignore_eos": True},
    "/v1/messages": {"model": MODEL, "messages": QUESTION, "max_tokens": 8},
    "/v1/responses": {"model": MODEL, "input": "Tell me a story.", "max_output_tokens": 8},
    "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}},
}
CHAT = "/v1/chat/completions"
LONGER: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": SOME},
    "/v1/completions": {"max_tokens": SOME},
    "/v1/responses": {"max_output_tokens": SOME},
    "/generate": {"sampling_params": {"max_new_tokens": SOME, "ignore_eos": True}},
}


@dataclass(frozen=True)
class Stack:
    """A gateway that sends every turn to the speculative pool first. Its engine runs one request, and queues one."""

    gateway: Gateway
    narrow: Engine
    wide: Engine
    http: aiohttp.ClientSession
    of_narrow: aiohttp.ClientSession
    """A session whose base URL is that of the narrow engine."""

    async def post(self, path: str, **fields: Any) -> tuple[aiohttp.ClientResponse, str]:
        async with self.http.post(self.gateway.url + path, json=BODIES[path] | fields) as response:
            return response, await response.text()


def engine(name: str, folder: Path, *flags: str) -> Engine:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"

    async def ready() -> bool:
        return await status_of(f"{url}/health") == 200

    served = ("--served-model-name", MODEL, *flags)
    command = [str(HERE / "launch-server"), "greedy", str(port), str(tiny_model()), *served]
    return Engine(Child(name, command, folder / f"{name}.log", ready, {"CUDA_VISIBLE_DEVICES": ""}), url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    install()
    folder = tmp_path_factory.mktemp("refusals")
    narrow = engine("narrow", folder, *LIMITS)
    wide = engine("wide", folder)
    try:
        for each in (narrow, wide):
            each.child.start()
        await asyncio.gather(*(each.child.wait_ready(LOAD_SECONDS) for each in (narrow, wide)))
        async with (
            LocalProcesses(folder, tiny_model()) as processes,
            aiohttp.ClientSession() as http,
            aiohttp.ClientSession(narrow.url) as of_narrow,
        ):
            routing = {"policy": "DeltaPrefill", "thresholdTokens": None}
            gateway = await processes.start_gateway([narrow], [wide], {"routing": routing})
            yield Stack(gateway, narrow, wide, http, of_narrow)
    finally:
        await asyncio.gather(*(each.child.stop(STOP_SECONDS) for each in (narrow, wide)))


async def turns(client: anthropic.AsyncAnthropic, name: str, headers: list[str]) -> list[Mapping[str, Any]]:
    """Two turns of a conversation about the file `name`, whose system prompts begin with these headers."""
    messages: list[MessageParam] = [{"role": "user", "content": f"Read file {name}. " * 40}]
    found: list[Mapping[str, Any]] = []
    for header in headers:
        blocks = [header, "You are a careful agent. " * 20] if header else ["You are a careful agent. " * 20]
        system: list[TextBlockParam] = [{"type": "text", "text": text} for text in blocks]
        answer = await client.messages.with_raw_response.create(
            model=MODEL, messages=messages, system=system, max_tokens=8
        )
        message = await answer.parse()
        found.append(
            {
                "history": answer.headers["x-dps-history"],
                "cached": message.usage.cache_read_input_tokens,
                "tokens": answer.headers["x-dps-prompt-tokens"],
            }
        )
        # Not the answer, whose length differs.
        messages += [{"role": "assistant", "content": "I have."}, {"role": "user", "content": "And then?"}]
    return found


async def test_changing_header_of_claude_code_costs_no_cached_tokens(stack: Stack) -> None:
    billing = [f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={each};" for each in "ab"]
    found = []
    for name, headers in (("A", ["", ""]), ("B", billing)):
        async with stack.http.post(f"{stack.narrow.url}/flush_cache") as response:
            assert response.status == 200
        async with anthropic.AsyncAnthropic(base_url=stack.gateway.url, api_key="none") as client:
            found.append(await turns(client, name, headers))
    assert found[0] == found[1]
    assert [turn["history"] for turn in found[1]] == ["new", "grown"]
    assert found[1][1]["cached"] > 100


async def test_answers_are_those_of_the_contract(stack: Stack) -> None:
    found = await refusals(stack.of_narrow)
    assert found == {case["name"]: case["answer"] for case in recorded()["refusals"]}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/generate"])
async def test_request_that_the_engine_aborts_is_served_by_the_other_pool(stack: Stack, path: str) -> None:
    """In /v1/messages, an answer that is aborted after its first token cannot be distinguished from a complete one."""
    asking = asyncio.create_task(stack.post(path, **LONGER[path]))
    await has(stack.of_narrow, 1)
    await abort(stack.of_narrow)
    response, text = await asking
    found = (response.status, response.headers.get("x-dps-reason"), failure_of(json.loads(text)))
    assert found == (200, "failover", None)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_stream_that_the_engine_aborts_is_continued_by_the_other_pool(stack: Stack, path: str) -> None:
    url = stack.gateway.url + path
    body = BODIES[path] | LONGER[path] | {"stream": True, "stream_options": {"include_usage": True}}
    async with stack.http.post(url, json=body) as response:
        text = (await response.content.readany()).decode()
        await abort(stack.of_narrow)
        text += await response.text()
    events = [json.loads(line[len("data: ") :]) for line in text.splitlines()[:-2] if line]
    assert (response.headers["x-dps-pool"], text.endswith("data: [DONE]\n\n")) == ("speculative", True)
    reasons = [choice["finish_reason"] for each in events for choice in each["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]
    assert events[-1]["usage"]["completion_tokens"] == SOME


async def test_streams_that_a_full_queue_refuses_are_served_by_the_other_pool(stack: Stack) -> None:
    """The last test, because five failures eject the engine."""
    async with others(stack.of_narrow, 2):
        for path in BODIES:
            response, text = await stack.post(path, stream=True)
            found = (response.status, response.headers.get("x-dps-reason"), "queue is full" in text)
            assert found == (200, "failover", False), (path, text)
