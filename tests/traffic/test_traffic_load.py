"""The load generator detects every fault a client would, with a real gateway and with a fake one."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_local.stack import MODEL
from dps_testkit.processes import LocalProcesses
from dps_testkit.traffic.load import LoadOptions, traffic
from dps_testkit.traffic.table import Row
from dps_testkit.waiting import wait_until

SLOW = ("--emulate-decode-step-seconds", "0.005", "0.0001")


async def case(url: str, inject: Callable[[], Awaitable[None]], **fields: Any) -> Row:
    """The row of a fault, after an undisturbed phase without errors."""
    options = LoadOptions(f"{url}/v1", MODEL, agents=4, turns=3, think_seconds=0.0, **fields)
    async with traffic(options) as running:
        await running.observe(12)
        baseline = await running.checkpoint("undisturbed")
        assert baseline.unnoticed, baseline.troubles
        await inject()
        await running.observe(12)
        return await running.checkpoint("fault")


@pytest.mark.timeout(240)
async def test_killed_gateway_causes_retries_and_loses_no_session(tmp_path: Path) -> None:
    async with LocalProcesses(tmp_path) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy", arguments=SLOW)
        redis = await processes.start_redis()
        session = {"redisUrl": redis.url, "redisTimeoutSeconds": 10}
        gateway = await processes.start_gateway([speculative], [greedy], {"session": session})

        async def kill() -> None:
            gateway.child.kill()
            gateway.child.start()

        row = await case(gateway.url, kill, attempts=60)

    assert row.retries > 0
    assert (row.events, row.failures, row.forgotten) == (0, 0, 0), row.troubles


@pytest.mark.timeout(240)
async def test_engine_lost_mid_stream_causes_error_event(tmp_path: Path) -> None:
    async with LocalProcesses(tmp_path) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy", arguments=SLOW)
        gateway = await processes.start_gateway([speculative], [greedy])

        async def break_streams() -> None:
            await greedy.emulate(disconnect_after_chunks=3)
            await wait_until(broken, "a stream is interrupted")
            await greedy.emulate()

        async def broken() -> bool:
            return await gateway.metric("dps_upstream_failures_total", kind="broken") > 0

        row = await case(gateway.url, break_streams)

    assert row.retries == row.events > 0
    assert (row.failures, row.forgotten) == (0, 0), row.troubles


def event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


@dataclass
class FakeGateway:
    """Answers as a gateway does, until `fault` is set. A token is a character."""

    fault: str = ""
    sessions: dict[str, list[int]] = field(default_factory=dict)
    """Prompt lengths of each session, by system prompt."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.fault == "responds with status 503":
            return web.json_response({"error": {"message": "no engine", "type": "server_error"}}, status=503)
        length = sum(len(message["content"]) for message in body["messages"])
        headers = self._headers(body["messages"][0]["content"], length)
        if self.fault == "omits the decision headers":
            headers = {}
        counted = length - 1 if self.fault == "reports a wrong prompt length" else length
        usage = {"prompt_tokens": counted, "completion_tokens": 1, "total_tokens": counted + 1}
        head = {"id": "1", "created": 1, "model": MODEL}
        if not body["stream"]:
            message = {"role": "assistant", "content": "Yes."}
            reason = None if self.fault == "omits finish_reason" else "stop"
            choice = {"index": 0, "finish_reason": reason, "message": message}
            completion = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(completion, headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        head["object"] = "chat.completion.chunk"
        delta = {"index": 0, "delta": {"content": "Yes."}, "finish_reason": None}
        await response.write(event({**head, "choices": [delta]}))
        if self.fault == "sends invalid JSON":
            await response.write(b"data: {\n\n")
        if self.fault == "closes the connection":
            assert request.transport is not None
            request.transport.close()
            return response
        if self.fault != "omits finish_reason":
            end = {"index": 0, "delta": {}, "finish_reason": "stop"}
            await response.write(event({**head, "choices": [end]}))
        await response.write(event({**head, "choices": [], "usage": usage}))
        if self.fault != "omits [DONE]":
            await response.write(b"data: [DONE]\n\n")
        return response

    def _headers(self, session: str, length: int) -> dict[str, str]:
        lengths = self.sessions.setdefault(session, [])
        if self.fault == "forgets sessions":
            lengths.clear()
        is_retry = bool(lengths) and lengths[-1] == length
        history = "grown" if lengths else "new"
        delta = length - (lengths[-1] if lengths else 0)
        if not is_retry:
            lengths.append(length)
        decision = {
            "pool": "greedy",
            "reason": "fixed",
            "state": "redis",
            "history": history,
            "turn": len(lengths),
            "delta-tokens": delta,
            "prompt-tokens": length,
        }
        return {f"x-dps-{name}": str(value) for name, value in decision.items()}


@asynccontextmanager
async def serving(server: FakeGateway) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


INCOMPLETE = {
    "responds with status 503": "status 503",
    "closes the connection": "peer closed connection",
    "omits finish_reason": "truncated: ",
    "omits [DONE]": "truncated: the stream ended without [DONE]",
}


@pytest.mark.parametrize(("fault", "words"), INCOMPLETE.items())
async def test_incomplete_answer_is_retried_and_finally_counted_as_failure(fault: str, words: str) -> None:
    server = FakeGateway()
    async with serving(server) as url:

        async def inject() -> None:
            server.fault = fault

        row = await case(url, inject, attempts=2)

    assert row.failures > 0
    assert row.retries >= row.failures
    assert all(words in trouble for trouble in row.troubles), row.troubles


LOST_STATE = {
    "forgets sessions": "new turn 1, ΔL ",
    "omits the decision headers": "no decision in the answer's headers",
    "reports a wrong prompt length": "prompt tokens, the engine counted ",
}


@pytest.mark.parametrize(("fault", "words"), LOST_STATE.items())
async def test_lost_session_state_is_reported(fault: str, words: str) -> None:
    server = FakeGateway()
    async with serving(server) as url:

        async def inject() -> None:
            server.fault = fault

        row = await case(url, inject)

    assert row.forgotten > 0
    assert (row.retries, row.failures) == (0, 0)
    assert all(words in trouble for trouble in row.troubles), row.troubles


async def test_unparseable_answer_raises_instead_of_waiting() -> None:
    server = FakeGateway()
    async with serving(server) as url:

        async def inject() -> None:
            server.fault = "sends invalid JSON"

        with pytest.raises(ValueError, match="double quotes"):
            await case(url, inject)
