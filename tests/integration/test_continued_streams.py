"""Streams whose engine is killed or freezes: another engine continues those of plain text.

The speculative engine sends several tokens in one event.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from dps_local.stack import MODEL
from dps_testkit.data_plane import CHAT, SLOW, chat, posted
from dps_testkit.http import metric
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from tests.integration.leftovers import leaking_no_files, replicas_ready, settled

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

TOKENS = 100
STREAMS = 12
"""More than the burst of the retry budget."""
EVENTS_BEFORE_FAILURE = 8
IDLE_SECONDS = 2
SPECULATION = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
SECTIONS: dict[str, dict[str, Any]] = {
    "routing": {"thresholdTokens": None},
    "timeouts": {"connectSeconds": 1, "idleSeconds": IDLE_SECONDS, "healthIntervalSeconds": 1},
}
"""Sends every turn to the speculative pool; the greedy one is only used for failover."""

SAMPLING = {"temperature": 1, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(TOKENS, **SAMPLING),
    "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": TOKENS, **SAMPLING},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": TOKENS, **SAMPLING}},
}


def text_of(event: dict[str, Any]) -> str:
    """The text in an event."""
    parts = [choice.get("delta", choice) for choice in event.get("choices", [event])]
    return "".join(part.get("content") or part.get("text") or "" for part in parts)


@dataclass(frozen=True)
class Stream:
    """The JSON objects in the events of a stream, and the text that a client has read."""

    events: list[dict[str, Any]]

    @property
    def text(self) -> str:
        texts = [text_of(event) for event in self.events if "error" not in event]
        return texts[-1] if "meta_info" in self.events[0] else "".join(texts)

    @property
    def failed(self) -> bool:
        return "error" in self.events[-1]

    @property
    def ids(self) -> set[str]:
        return {str(event.get("id") or event["meta_info"]["id"]) for event in self.events}

    @property
    def tokens(self) -> tuple[int, int]:
        """The tokens of the prompt and of the answer that the last event reports."""
        usage = self.events[-1].get("usage") or self.events[-1]["meta_info"]
        return usage["prompt_tokens"], usage["completion_tokens"]


Failure = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class TwoEngines:
    """A gateway whose speculative engine will fail while it streams an answer."""

    gateway: Gateway
    speculative: Engine
    greedy: Engine

    async def stream(self, body: dict[str, Any], fail: Failure, path: str = CHAT, **headers: str) -> Stream:
        """The stream of an answer, during which `fail` is called after some events."""
        events: list[dict[str, Any]] = []
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        async with posted(self.gateway.url + path, body | streamed, **headers) as response:
            assert (response.status, response.headers["x-dps-pool"]) == (200, "speculative")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line.removeprefix(b"data: ")))
                    if len(events) == EVENTS_BEFORE_FAILURE:
                        await fail()
        return Stream(events)

    async def kill(self) -> None:
        self.speculative.child.kill()

    async def freeze(self) -> None:
        self.speculative.child.signal(signal.SIGSTOP)

    async def nothing(self) -> None:
        pass

    async def continuations(self, outcome: str) -> float:
        return await self.gateway.metric("dps_stream_continuations_total", outcome=outcome)

    async def recover(self) -> None:
        """Start or continue the speculative engine, and wait until nothing is left of earlier requests."""
        if not self.speculative.child.ended:
            self.speculative.child.signal(signal.SIGCONT)
        for engine in (self.speculative, self.greedy):
            if engine.child.ended:
                engine.child.start()
            await engine.child.wait_ready()
        await replicas_ready(self.gateway, 2)
        await settled(self.gateway, self.speculative, self.greedy)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProcesses]:
    async with LocalProcesses(tmp_path_factory.mktemp("continued")) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(processes: LocalProcesses) -> AsyncIterator[TwoEngines]:
    (speculative,) = await processes.start_engines("speculative", arguments=(*SLOW, *SPECULATION))
    (greedy,) = await processes.start_engines("greedy", arguments=SLOW)
    gateway = await processes.start_gateway([speculative], [greedy], SECTIONS)
    async with leaking_no_files(gateway, STREAMS):
        yield TwoEngines(gateway, speculative, greedy)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def recovered(two: TwoEngines) -> AsyncIterator[None]:
    yield
    await two.recover()


async def test_streams_of_a_killed_engine_are_continued_by_the_other(two: TwoEngines) -> None:
    undisturbed = {path: await two.stream(body, two.nothing, path) for path, body in BODIES.items()}
    begun = asyncio.Barrier(len(BODIES))

    async def kill_when_all_have_begun() -> None:
        await begun.wait()
        await two.kill()

    streams = await asyncio.gather(
        *(two.stream(body, kill_when_all_have_begun, path) for path, body in BODIES.items())
    )
    for path, stream in zip(BODIES, streams, strict=True):
        assert not stream.failed, path
        assert len(stream.ids) == 1
        assert stream.tokens == undisturbed[path].tokens
        assert len(stream.text.split()) == len(undisturbed[path].text.split()) == stream.tokens[1] == TOKENS
        assert stream.events[-1].keys() == undisturbed[path].events[-1].keys()
    assert await two.continuations("continued") == len(BODIES)
    await settled(two.gateway)


async def test_continued_turn_is_recorded_with_the_usage_of_the_whole_answer(two: TwoEngines) -> None:
    session = {"x-session-id": "continued"}
    stream = await two.stream(BODIES[CHAT], two.kill, **session)
    assert stream.tokens[1] == TOKENS

    more: list[dict[str, str]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": stream.text},
        {"role": "user", "content": "more"},
    ]
    async with posted(two.gateway.url + CHAT, chat() | {"messages": more}, **session) as response:
        usage = (await response.json())["usage"]
        assert [response.headers[f"x-dps-{name}"] for name in ("turn", "history", "pool")] == [
            "2",
            "grown",
            "greedy",
        ]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert int(response.headers["x-dps-delta-tokens"]) < usage["prompt_tokens"]


async def test_stream_of_a_frozen_engine_is_continued_by_the_other(two: TwoEngines) -> None:
    stream = await two.stream(BODIES[CHAT], two.freeze)
    assert not stream.failed
    assert stream.tokens[1] == TOKENS


async def test_all_streams_of_a_killed_engine_are_continued(two: TwoEngines) -> None:
    continued = await two.continuations("continued")
    lengths = range(TOKENS, TOKENS + STREAMS)
    streams = [two.stream(BODIES[CHAT] | {"max_tokens": length}, two.kill) for length in lengths]
    answered = await asyncio.gather(*streams)

    assert not any(stream.failed for stream in answered)
    assert [stream.tokens[1] for stream in answered] == list(lengths)
    assert await two.continuations("continued") == continued + len(answered)


async def test_request_is_not_repeated_if_the_client_has_left(two: TwoEngines) -> None:
    requests = await metric(two.greedy.url, "sglang:num_requests_total")
    outcomes = await two.gateway.metric("dps_stream_continuations_total")
    async with posted(two.gateway.url + CHAT, chat(20_000, stream=True)) as response:
        await response.content.readany()
    await settled(two.gateway)
    await two.kill()
    assert await metric(two.greedy.url, "sglang:num_requests_total") == requests
    assert await two.gateway.metric("dps_stream_continuations_total") == outcomes
