"""Each turn is one trace in Phoenix, from the client's span to SGLang's own spans."""

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from dps_local.stack import MODEL, START_SECONDS
from dps_testkit.waiting import eventually_async
from e2e.real_sglang import local_sglang
from e2e.traces.agent import MAX_TOKENS, SPAN, TURNS, Agent, Turn
from e2e.traces.phoenix import Phoenix, phoenix
from e2e.traces.spans import Node, tree
from e2e.traces.traced_stack import Engines, TracedStack, traced_stack

THRESHOLD = 128
SERVER_SPAN = "POST /v1/chat/completions"
SEARCHED = ("dps.request_id", "dps.session", "dps.pool", "dps.reason")
"""Attributes of the decision that the SERVER span repeats."""
BY_GRPC, BY_HTTP = 0, 1
GATEWAYS = (BY_HTTP, BY_GRPC, BY_GRPC, BY_HTTP)
"""The gateway for each turn."""


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

INSTALL = Path(__file__).parent / "install"
INSTALL_SECONDS = 900.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[Phoenix]:
    await asyncio.to_thread(subprocess.run, [INSTALL], check=True, timeout=INSTALL_SECONDS)
    async with phoenix() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["emulated", "sglang"])
async def running(
    request: pytest.FixtureRequest, backend: Phoenix
) -> AsyncIterator[tuple[TracedStack, Engines]]:
    engines: Engines = request.param
    if engines == "sglang":
        await asyncio.to_thread(local_sglang.install)
    async with traced_stack(engines, backend) as started:
        yield started, engines


async def play(traced: TracedStack, topic: str, conversation_id: str | None) -> list[Turn]:
    """Send all turns of a session, each to its gateway. topic: a beginning that no other session has."""
    agent = Agent(MODEL, traced.phoenix.grpc_url, conversation_id)
    try:
        return [
            await asyncio.to_thread(agent.send, traced.stack.urls[gateway], f"{topic}: {text}", stream=stream)
            for gateway, (stream, text) in zip(GATEWAYS, TURNS, strict=True)
        ]
    finally:
        await asyncio.to_thread(agent.close)


async def test_each_turn_is_one_trace_from_client_to_engine(running: tuple[TracedStack, Engines]) -> None:
    traced, engines = running
    conversation = f"conversation with {engines} engines"
    turns = await play(traced, conversation, conversation)
    assert [turn.headers["x-dps-pool"] for turn in turns] == ["greedy", "speculative"] * 2
    cached: dict[str, int] = {}
    for turn in turns:
        decision = route_attributes(turn.headers, cached)
        cached[decision["dps.pool"]] = decision["dps.prompt_tokens"]
        expected = (
            Node(
                SPAN,
                {},
                (
                    Node(
                        SERVER_SPAN,
                        {name: decision[name] for name in SEARCHED}
                        | {
                            "gen_ai.conversation.id": conversation,
                            "http.request.method": "POST",
                            "http.route": "/v1/chat/completions",
                            "http.response.status_code": 200,
                        },
                        (
                            Node("dps.route", decision),
                            Node(
                                f"chat {MODEL}",
                                call_attributes(turn, conversation, decision, traced.stack.engine_urls),
                                engine_spans(turn) if engines == "sglang" else (),
                            ),
                        ),
                    ),
                ),
            ),
        )

        async def as_expected(turn: Turn = turn, expected: tuple[Node, ...] = expected) -> None:
            assert tree(await traced.phoenix.spans(trace_id=turn.trace_id)) == expected

        await eventually_async(as_expected, START_SECONDS)

    assert await traced.phoenix.conversation(conversation) == [turn.trace_id for turn in turns]


async def test_unsampled_request_produces_no_spans(
    running: tuple[TracedStack, Engines],
) -> None:
    traced, engines = running
    unsampled = uuid.uuid4().hex
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Do not sample this."}], "max_tokens": 4}
    headers = {"traceparent": f"00-{unsampled}-00f067aa0ba902b7-00"}
    for url in traced.stack.urls:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http,
            http.post(f"{url}/chat/completions", json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()
    turns = await play(traced, f"after an unsampled request, {engines} engines", None)

    async def later_turns_have_arrived() -> None:
        for turn in turns:
            names = {span.name for span in await traced.phoenix.spans(trace_id=turn.trace_id)}
            assert {SPAN, SERVER_SPAN, *(["decode_forward"] if engines == "sglang" else [])} <= names

    await eventually_async(later_turns_have_arrived, START_SECONDS)
    assert await traced.phoenix.spans(trace_id=unsampled) == []


def route_attributes(headers: Mapping[str, str], cached: Mapping[str, int]) -> dict[str, Any]:
    """The expected attributes of `dps.route`: values of response headers, τ, and the uncached tokens of each pool.

    cached: number of tokens of the longest prompt that each pool has cached so far.
    """
    numbers = ("prompt-tokens", "delta-tokens", "turn")
    words = ("pool", "reason", "state", "history", "session")
    length = int(headers["x-dps-prompt-tokens"])
    return {
        "dps.request_id": headers["x-request-id"],
        "dps.threshold_tokens": THRESHOLD,
        **{f"dps.{name.replace('-', '_')}": int(headers[f"x-dps-{name}"]) for name in numbers},
        **{f"dps.{name}": headers[f"x-dps-{name}"] for name in words},
        **{f"dps.uncached_tokens.{pool}": length - cached.get(pool, 0) for pool in ("speculative", "greedy")},
    }


def call_attributes(
    turn: Turn, conversation: str, decision: Mapping[str, Any], engine_urls: Mapping[Any, str]
) -> dict[str, Any]:
    """The expected attributes of the gateway's CLIENT span."""
    engine = urlsplit(engine_urls[decision["dps.pool"]])
    return {
        "dps.pool": decision["dps.pool"],
        "dps.reason": decision["dps.reason"],
        "gen_ai.conversation.id": conversation,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sglang",
        "gen_ai.request.max_tokens": MAX_TOKENS,
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": turn.streamed,
        "gen_ai.request.temperature": 0,
        "gen_ai.response.id": turn.response_id,
        "gen_ai.response.model": MODEL,
        "gen_ai.usage.cache_read.input_tokens": cached_tokens(turn),
        "gen_ai.usage.input_tokens": decision["dps.prompt_tokens"],
        "gen_ai.usage.output_tokens": turn.usage.completion_tokens,
        "http.response.status_code": 200,
        "server.address": engine.hostname,
        "server.port": engine.port,
        "gen_ai.response.finish_reasons": ["length"],
    }


def cached_tokens(turn: Turn) -> int:
    """The cached prompt tokens reported in the answer's usage."""
    details = turn.usage.prompt_tokens_details
    assert details is not None
    return details.cached_tokens or 0


def engine_spans(turn: Turn) -> tuple[Node, ...]:
    """The expected spans of SGLang 0.5.23 at trace level 2."""
    request = {
        "gen_ai.request.id": turn.response_id,
        "gen_ai.request.max_tokens": MAX_TOKENS,
        "gen_ai.request.n": 1,
        "gen_ai.request.top_k": -1,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": '["length"]',
        "gen_ai.response.model": MODEL,
        "gen_ai.usage.cached_tokens": cached_tokens(turn),
        "gen_ai.usage.completion_tokens": turn.usage.completion_tokens,
        "gen_ai.usage.prompt_tokens": turn.usage.prompt_tokens,
    }
    steps = ("request_process", "prefill_waiting", "prefill_forward", "decode_waiting", "decode_forward")
    tokenizer = (Node("tokenize"), Node("api_server_dispatch"))
    scheduler = tuple(Node(step) for step in steps)
    return (Node("Req", request, (Node("Tokenizer", {}, tokenizer), Node("Scheduler", {}, scheduler))),)
