"""Streams whose engine is killed or freezes: another engine continues those of deterministic requests.

The engines generate the same tokens, but the speculative one sends several of them in one event.
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
from dps_testkit.leftovers import leaking_no_files, settled
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

TOKENS = 100
EVENTS_BEFORE_FAILURE = 8
IDLE_SECONDS = 2
SPECULATION = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
SECTIONS: dict[str, dict[str, Any]] = {
    "routing": {"thresholdTokens": None},
    "timeouts": {"connectSeconds": 1, "idleSeconds": IDLE_SECONDS, "healthIntervalSeconds": 1},
}
"""Sends every turn to the speculative pool; the greedy one is only used for failover."""

GREEDY = {"temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(TOKENS, temperature=0, stream_options={"include_usage": True}),
    "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": TOKENS, **GREEDY},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": TOKENS, **GREEDY}},
}


def text_of(document: dict[str, Any]) -> str:
    """The text in an answer or in an event."""
    if "choices" in document:
        choices = document["choices"]
        parts = [choice.get("message") or choice.get("delta") or choice for choice in choices]
        return "".join(part.get("content") or part.get("text") or "" for part in parts)
    if "content" in document:
        return "".join(block["text"] for block in document["content"])
    text = document.get("text", document.get("delta", {}).get("text", ""))
    assert isinstance(text, str)
    return text


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
        found = [event.get("id") or event.get("meta_info", {}).get("id") for event in self.events]
        return {str(each) for each in found if each is not None}


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
        async with posted(self.gateway.url + path, body | {"stream": True}, **headers) as response:
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

    async def answer(self, path: str, body: dict[str, Any]) -> str:
        """The greedy engine's own answer."""
        async with posted(self.greedy.url + path, body) as response:
            return text_of(await response.json())

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

        async def ready() -> bool:
            return await self.gateway.metric("dps_ready_replicas") == 2

        await wait_until(ready, "both engines are ready")
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
    async with leaking_no_files(gateway):
        yield TwoEngines(gateway, speculative, greedy)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def recovered(two: TwoEngines) -> AsyncIterator[None]:
    yield
    await two.recover()


async def test_streams_of_a_killed_engine_are_continued_by_the_other(two: TwoEngines) -> None:
    expected = {path: await two.answer(path, body) for path, body in BODIES.items()}
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
        assert stream.text == expected[path] == undisturbed[path].text
        assert len(stream.ids) == len(undisturbed[path].ids) <= 1
        assert stream.events[-1].keys() == undisturbed[path].events[-1].keys()
    assert await two.continuations("continued") == len(BODIES)
    await settled(two.gateway)


async def test_continued_turn_is_recorded_with_the_usage_of_the_whole_answer(two: TwoEngines) -> None:
    body = BODIES[CHAT]
    session = {"x-session-id": "continued"}
    stream = await two.stream(body, two.kill, **session)
    assert stream.events[-1]["usage"]["completion_tokens"] == TOKENS

    more = [*MESSAGES, {"role": "assistant", "content": stream.text}, {"role": "user", "content": "more"}]
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
    assert stream.text == await two.answer(CHAT, BODIES[CHAT])


async def test_all_streams_of_a_killed_engine_are_continued(two: TwoEngines) -> None:
    """There are more than the burst of the retry budget."""
    continued = await two.continuations("continued")
    body = BODIES[CHAT]
    streams = [two.stream(body | {"max_tokens": TOKENS + number}, two.kill) for number in range(24)]
    answered = await asyncio.gather(*streams)

    expected = await two.answer(CHAT, body | {"max_tokens": TOKENS + 23})
    assert not any(stream.failed for stream in answered)
    assert all(expected.startswith(stream.text) for stream in answered)
    assert len({stream.text for stream in answered}) == len(answered)
    assert await two.continuations("continued") == continued + len(answered)


async def test_stream_of_a_request_that_is_not_deterministic_ends_with_an_error_event(
    two: TwoEngines,
) -> None:
    requests = await metric(two.greedy.url, "sglang:num_requests_total")
    stream = await two.stream(chat(TOKENS, temperature=1), two.kill)
    assert stream.events[-1]["error"]["code"] == "upstream_broken"
    assert await metric(two.greedy.url, "sglang:num_requests_total") == requests


async def test_stream_ends_with_an_error_event_if_both_engines_are_killed(two: TwoEngines) -> None:
    failed = await two.continuations("failed")
    expected = await two.answer(CHAT, BODIES[CHAT])

    async def kill_both() -> None:
        two.greedy.child.kill()
        two.speculative.child.kill()

    stream = await two.stream(BODIES[CHAT], kill_both)
    assert stream.events[-1]["error"]["code"] == "upstream_broken"
    assert expected.startswith(stream.text)
    assert await two.continuations("failed") == failed + 1


async def test_stream_ends_with_an_error_event_if_the_other_engine_breaks_off_as_well(
    two: TwoEngines,
) -> None:
    await two.greedy.emulate(disconnect_after_chunks=20)
    expected = await two.answer(CHAT, BODIES[CHAT])
    stream = await two.stream(BODIES[CHAT], two.kill)
    await two.greedy.emulate()
    assert stream.events[-1]["error"]["code"] == "upstream_broken"
    assert expected.startswith(stream.text)


async def test_request_is_not_repeated_if_the_client_has_left(two: TwoEngines) -> None:
    requests = await metric(two.greedy.url, "sglang:num_requests_total")
    outcomes = await two.gateway.metric("dps_stream_continuations_total")
    async with posted(two.gateway.url + CHAT, chat(20_000, temperature=0, stream=True)) as response:
        await response.content.readany()
    await settled(two.gateway)
    await two.kill()
    assert await metric(two.greedy.url, "sglang:num_requests_total") == requests
    assert await two.gateway.metric("dps_stream_continuations_total") == outcomes


async def test_answer_of_an_engine_that_generates_other_tokens_adds_nothing(
    two: TwoEngines, processes: LocalProcesses
) -> None:
    (different,) = await processes.start_engines("different", arguments=(*SLOW, "--random-seed", "7"))
    gateway = await processes.start_gateway([two.speculative], [different], SECTIONS)
    other = TwoEngines(gateway, two.speculative, different)
    expected = await two.answer(CHAT, BODIES[CHAT])
    stream = await other.stream(BODIES[CHAT], other.kill)

    assert stream.events[-1]["error"]["code"] == "upstream_broken"
    assert expected.startswith(stream.text)
    assert await other.continuations("different") == 1
    await settled(gateway, different)
