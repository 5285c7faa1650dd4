"""Heartbeats of streaming requests while an engine, or the queue, lets them wait."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from dps_gateway.api.sse import MAX_HELD_BYTES
from dps_gateway.telemetry.json_log import JsonLog
from dps_testkit.in_process_gateway import CHUNK, DONE, InProcessGateway, ScriptedEngine, chat, send_stream
from tests.gateway.public_api.test_failures_in_answers import (
    BODIES,
    FINISHED,
    MESSAGES,
    RESPONSES,
    event,
)
from tests.gateway.servers import configure

SECONDS = 0.1
COMMENT = b": heartbeat\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


@pytest.fixture(autouse=True)
def frequent(gateway: InProcessGateway) -> None:
    configure(gateway.runtime, "timeouts", heartbeat_seconds=SECONDS)


def slowly(engine: ScriptedEngine, *pieces: bytes, pause_seconds: float = 3 * SECONDS) -> None:
    """Answer with a stream that pauses before each piece."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(pause_seconds)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for number, piece in enumerate(pieces):
            await asyncio.sleep(pause_seconds if number else 0)
            await stream.write(piece)
        return stream

    engine.answer = answer


def without(heartbeat: bytes, content: bytes) -> bytes:
    """The content without heartbeats, of which it has some."""
    assert heartbeat in content
    return content.replace(heartbeat, b"")


def heartbeat_of(path: str) -> bytes:
    return PING if path == MESSAGES else COMMENT


@pytest.mark.parametrize("path", FINISHED)
async def test_silent_stream_has_heartbeats_between_its_events(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str
) -> None:
    first, last = FINISHED[path][-2:]
    slowly(engine, first, first[:9], first[9:], last)
    answer, content = await gateway.post(path, json=BODIES[path] | {"stream": True})
    assert (answer.status, answer.content_type) == (200, "text/event-stream")
    before, *rest = content.split(first)
    heartbeat = heartbeat_of(path)
    assert before.count(heartbeat) >= 2
    assert [without(heartbeat, each) for each in (before, *rest)] == [b"", b"", last]


async def test_headers_that_the_first_heartbeat_cannot_know_are_missing(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    slowly(engine, CHUNK, DONE)
    headers = (await gateway.post(json=chat(stream=True)))[0].headers
    assert "x-dps-delta-tokens" in headers
    assert "x-request-id" in headers
    assert headers.keys().isdisjoint({"x-dps-pool", "x-dps-reason"})


async def test_stream_without_silence_and_unary_answer_have_no_heartbeats(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    configure(gateway.runtime, "timeouts", heartbeat_seconds=1.0)
    slowly(engine, *[CHUNK] * 4, DONE, pause_seconds=0.3)
    answer, content = await gateway.post(json=chat(stream=True))
    assert content == CHUNK * 4 + DONE
    assert "x-dps-pool" in answer.headers

    async def late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3 * SECONDS)
        return web.json_response({"choices": []})

    engine.answer = late
    configure(gateway.runtime, "timeouts", heartbeat_seconds=SECONDS)
    assert (await gateway.post(json=chat()))[1] == b'{"choices": []}'


async def test_queued_stream_has_heartbeats(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    for pool in gateway.runtime.pools.values():
        pool.max_in_flight_per_replica = 1
    slowly(engine, CHUNK, DONE, pause_seconds=5 * SECONDS)
    requests = [gateway.post(json=chat(stream=True, seed=number)) for number in range(3)]
    contents = [content for _, content in await asyncio.gather(*requests)]
    assert max(content.split(CHUNK)[0].count(COMMENT) for content in contents) >= 8
    assert [without(COMMENT, content) for content in contents] == [CHUNK + DONE] * 3


async def test_no_heartbeat_is_sent_within_an_event(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    long = event({"choices": [{"delta": {"content": "a" * 2 * MAX_HELD_BYTES}}]})
    slowly(engine, long[: MAX_HELD_BYTES + 9], long[MAX_HELD_BYTES + 9 :], DONE)
    _, content = await gateway.post(json=chat(stream=True))
    assert long in content


@pytest.mark.parametrize("path", FINISHED)
@pytest.mark.parametrize(
    ("status", "message"),
    [(503, "busy"), (400, "too long"), (None, "the engine closed the connection")],
)
async def test_failure_after_a_heartbeat_is_an_error_event(
    gateway: InProcessGateway,
    engine: ScriptedEngine,
    path: str,
    status: int | None,
    message: str,
    tmp_path: Path,
) -> None:
    gateway.runtime.access_log = log = JsonLog(tmp_path / "access.jsonl")

    async def fail(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3 * SECONDS)
        if status is None:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"error": {"message": message}}, status=status or 500)

    engine.answer = fail
    answer, content = await gateway.post(path, json=BODIES[path] | {"stream": True})
    assert answer.status == 200
    name, _, data = without(heartbeat_of(path), content).partition(b"data: ")
    assert message in json.loads(data)["error"]["message"]
    assert name == (b"event: error\n" if path in (MESSAGES, RESPONSES) else b"")
    await log.flush()
    entry = json.loads((tmp_path / "access.jsonl").read_text())
    assert (entry["status"], entry["outcome"]) == (200, "failed")


async def test_attempt_that_fails_after_a_heartbeat_is_retried(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    attempts: list[web.Request] = []

    async def second_time(request: web.Request) -> web.StreamResponse:
        attempts.append(request)
        await asyncio.sleep(3 * SECONDS)
        if len(attempts) == 1:
            return web.json_response({"error": {"message": "busy"}}, status=503)
        return await send_stream(request, (CHUNK, DONE))

    engine.answer = second_time
    _, content = await gateway.post(json=chat(stream=True))
    assert (len(attempts), without(COMMENT, content)) == (2, CHUNK + DONE)


async def test_commit_of_an_answer_without_a_stream_has_no_heartbeats(
    gateway: InProcessGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow_commit(*arguments: object) -> None:
        await asyncio.sleep(3 * SECONDS)

    monkeypatch.setattr(gateway.runtime.turns, "commit", slow_commit)
    body = {"id": "c", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    engine.respond(text=json.dumps(body), content_type="application/json")
    async with asyncio.timeout(10):
        response, content = await gateway.post(json=chat(stream=True))
    assert (response.status, response.content_type) == (200, "application/json")
    assert json.loads(content) == body
