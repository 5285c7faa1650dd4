"""The replay client with servers that answer, disconnect, reject and disappear."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from dps_lab.replay.cli import main
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.records import TurnRecord, Usage, Verdict
from dps_lab.replay.run import replay
from dps_lab.workload.sessions import Session, Turn

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
HEADERS = {
    "x-dps-pool": "greedy",
    "x-dps-reason": "over_threshold",
    "x-dps-delta-tokens": "9",
    "x-dps-prompt-tokens": "9",
    "x-dps-turn": "1",
    "x-dps-history": "new",
    "x-dps-state": "redis",
}
FIRST = Verdict("greedy", "over_threshold", 9, 9, 1, "new", "redis")
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def sse(*events: Any) -> str:
    return "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


WHOLE = sse(
    chunk(role="assistant", content=""),
    chunk(content="he"),
    chunk(content="llo"),
    {"choices": [], "usage": USAGE},
    "[DONE]",
)


async def stream(request: web.Request, text: str, headers: dict[str, str] = HEADERS) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
    await response.prepare(request)
    await response.write(text.encode())
    await response.write_eof()
    return response


async def answering(request: web.Request) -> web.StreamResponse:
    return await stream(request, WHOLE)


class Script:
    """A server that records its requests and answers them with a list of handlers in turn; the last one repeats."""

    def __init__(self, *handlers: Handler) -> None:
        self.handlers = list(handlers)
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str | None] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.sessions.append(request.headers.get("x-session-id"))
        handler = self.handlers.pop(0) if len(self.handlers) > 1 else self.handlers[0]
        return await handler(request)


Serve = Callable[[Script], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def serve(script: Script) -> str:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", script.handle)
            server = await stack.enter_async_context(TestServer(app))
            return str(server.make_url("/v1"))

        yield serve


def session(name: str = "s", turns: int = 1) -> Session:
    return Session(
        id=name,
        turns=[
            Turn(
                messages=[{"role": "user", "content": f"question {number}"}],
                answer={"role": "assistant", "content": f"recorded {number}"},
            )
            for number in range(turns)
        ],
    )


async def send(options: ReplayOptions, *sessions: Session) -> Sequence[TurnRecord]:
    result = await replay(sessions, replace(options, first_wait=0.0), concurrency=1)
    return result.turns


def options(*urls: str, **changes: Any) -> ReplayOptions:
    return ReplayOptions(urls=urls, model="m", **changes)


async def test_streamed_turn_is_recorded_completely(serve: Serve) -> None:
    url = await serve(script := Script(answering))
    [record] = await send(options(url, run="r-", max_tokens=5, extra_body={"ignore_eos": True}), session())
    assert record == TurnRecord(
        session="s",
        turn=1,
        url=url,
        status=200,
        verdict=FIRST,
        attempts=1,
        unacknowledged=0,
        started=record.started,
        ttft=record.ttft,
        latency=record.latency,
        usage=Usage(9, 2, 4),
        error=None,
    )
    assert record.ttft is not None
    assert 0 < record.ttft <= record.latency
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "question 0"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "ignore_eos": True,
    }
    assert (script.sessions, script.bodies) == (["r-s"], [body])


async def calling_without_streaming(request: web.Request) -> web.StreamResponse:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return web.json_response({"choices": [{"message": message}], "usage": USAGE}, headers=HEADERS)


async def calling(request: web.Request) -> web.StreamResponse:
    first = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
    rest = {"index": 0, "function": {"arguments": "}"}}
    return await stream(request, sse(chunk(tool_calls=[first]), chunk(tool_calls=[rest]), "[DONE]"))


@pytest.mark.parametrize(
    ("handler", "changes", "answer"),
    [
        (answering, {}, {"role": "assistant", "content": "recorded 0"}),
        (answering, {"answers": "model"}, {"role": "assistant", "content": "hello"}),
        (
            calling_without_streaming,
            {"answers": "model", "stream": False},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        (calling, {"answers": "model"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
    ],
)
async def test_next_turn_contains_the_recorded_or_the_models_answer(
    serve: Serve, handler: Handler, changes: dict[str, Any], answer: dict[str, Any]
) -> None:
    url = await serve(script := Script(handler))
    await send(options(url, **changes), session(turns=2))
    assert script.bodies[1]["messages"] == [
        {"role": "user", "content": "question 0"},
        answer,
        {"role": "user", "content": "question 1"},
    ]


async def broken_stream(request: web.Request) -> web.StreamResponse:
    return await stream(request, sse(chunk(content="he")))


async def error_event(request: web.Request) -> web.StreamResponse:
    return await stream(request, sse(chunk(content="he"), {"error": {"message": "gone"}}))


async def hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def busy(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, headers={"Retry-After": "0"})


async def second_verdict(request: web.Request) -> web.StreamResponse:
    return await stream(request, WHOLE, HEADERS | {"x-dps-delta-tokens": "0", "x-dps-pool": "speculative"})


REPEATED = replace(FIRST, pool="speculative", delta_tokens=0)


@pytest.mark.parametrize(
    ("failure", "verdict", "unacknowledged"),
    [
        (broken_stream, FIRST, 0),  # its headers arrived, so they are the decision
        (error_event, FIRST, 0),
        (hangs_up, REPEATED, 1),
        (busy, REPEATED, 0),
    ],
)
async def test_failed_attempt_is_retried_and_the_first_decision_counts(
    serve: Serve, failure: Handler, verdict: Verdict, unacknowledged: int
) -> None:
    url = await serve(Script(failure, second_verdict))
    [record] = await send(options(url), session())
    found = (record.verdict, record.attempts, record.unacknowledged, record.error)
    assert found == (verdict, 2, unacknowledged, None)


async def test_retry_goes_to_another_server(serve: Serve) -> None:
    gone = f"http://127.0.0.1:{unused_port()}/v1"
    here = await serve(Script(answering))
    records = await send(options(gone, here), session(turns=3))
    assert [(record.url, record.error) for record in records] == [(here, None)] * 3


async def refusing(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such model"}}, status=404)


@pytest.mark.parametrize(("handler", "attempts"), [(refusing, 1), (busy, 4)])
async def test_session_ends_at_a_lost_turn(serve: Serve, handler: Handler, attempts: int) -> None:
    url = await serve(Script(answering, handler))
    result = await replay([session(turns=3)], options(url, attempts=4), concurrency=1)
    assert [(record.turn, record.attempts, record.error is None) for record in result.turns] == [
        (1, 1, True),
        (2, attempts, False),
    ]
    assert result.planned_turns == 3


@pytest.mark.parametrize("pace", [{"concurrency": 2}, {"concurrency": 50}, {"rate": 1e6}])
async def test_every_turn_of_every_session_is_sent_in_order(serve: Serve, pace: dict[str, Any]) -> None:
    url = await serve(Script(answering))
    heard: list[TurnRecord] = []
    sessions = [session(f"s{number}", turns=3) for number in range(7)]
    result = await replay(sessions, options(url), **pace, on_turn=heard.append)
    assert heard == result.turns
    assert {name: [record.turn for record in turns] for name, turns in result.by_session().items()} == {
        item.id: [1, 2, 3] for item in sessions
    }


async def test_closed_loop_does_not_exceed_its_concurrency(serve: Serve) -> None:
    running: set[str | None] = set()
    most = 0

    async def count(request: web.Request) -> web.StreamResponse:
        nonlocal most
        running.add(request.headers.get("x-session-id"))
        most = max(most, len(running))
        response = await stream(request, WHOLE)
        running.discard(request.headers.get("x-session-id"))
        return response

    url = await serve(Script(count))
    await replay([session(f"s{number}", turns=2) for number in range(9)], options(url), concurrency=3)
    assert 1 <= most <= 3


@pytest.mark.parametrize(
    ("content", "message"), [(b"{}", "s.jsonl, line 1: id: Field required"), (b"\xff{}", "is not UTF-8 text")]
)
def test_invalid_session_file_is_reported(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.jsonl").write_bytes(content)
    assert main(["http://127.0.0.1:1/v1", "--sessions", str(tmp_path / "s.jsonl")]) == 2
    assert message in capsys.readouterr().err


async def test_command_prints_tables_and_writes_the_records(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await serve(Script(answering))
    (tmp_path / "s.jsonl").write_text(session(turns=2).model_dump_json())
    files = ["--sessions", str(tmp_path / "s.jsonl"), "--json", str(tmp_path / "out.json")]
    assert await asyncio.to_thread(main, [url, *files]) == 0
    printed = capsys.readouterr().out
    assert "turns by pool and reason" in printed
    assert "over_threshold" in printed
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["planned_turns"] == 2
    assert [turn["verdict"]["pool"] for turn in written["turns"]] == ["greedy", "greedy"]
