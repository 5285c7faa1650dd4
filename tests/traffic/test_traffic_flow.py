"""The traffic itself: that it notices what a client would, at a gateway with emulated engines and at one made up."""

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
from dps_testkit.processes import Site
from dps_testkit.traffic.flow import Flow, traffic
from dps_testkit.traffic.table import Row
from dps_testkit.waiting import wait_until

SLOW = ("--emulate-decode-step-seconds", "0.005", "0.0001")


async def case(url: str, strike: Callable[[], Awaitable[None]], **options: Any) -> Row:
    """The row of a fault, after an undisturbed phase in which nothing is noticed."""
    flow = Flow(f"{url}/v1", MODEL, agents=4, turns=3, think_seconds=0.0, **options)
    async with traffic(flow) as under_way:
        await under_way.observe(12)
        calm = await under_way.checkpoint("undisturbed")
        assert calm.unnoticed, calm.troubles
        await strike()
        await under_way.observe(12)
        return await under_way.checkpoint("struck")


@pytest.mark.timeout(240)
async def test_a_gateway_that_is_killed_costs_retries_and_no_session(tmp_path: Path) -> None:
    async with Site(tmp_path) as site:
        speculative, greedy = await site.engines("speculative", "greedy", arguments=SLOW)
        redis = await site.redis()
        session = {"redisUrl": redis.url, "redisTimeoutSeconds": 10}
        gateway = await site.gateway([speculative], [greedy], {"session": session})

        async def kill() -> None:
            gateway.child.kill()
            gateway.child.start()

        seen = await case(gateway.url, kill, attempts=60)

    assert seen.retries > 0
    assert (seen.events, seen.failures, seen.forgotten) == (0, 0, 0), seen.troubles


@pytest.mark.timeout(240)
async def test_an_engine_that_is_lost_in_mid_stream_is_an_error_event(tmp_path: Path) -> None:
    async with Site(tmp_path) as site:
        speculative, greedy = await site.engines("speculative", "greedy", arguments=SLOW)
        gateway = await site.gateway([speculative], [greedy])

        async def break_streams() -> None:
            await greedy.emulate(disconnect_after_chunks=3)
            await wait_until(broken, "a stream breaks")
            await greedy.emulate()

        async def broken() -> bool:
            return await gateway.metric("dps_upstream_failures_total", kind="broken") > 0

        seen = await case(gateway.url, break_streams)

    assert seen.retries == seen.events > 0
    assert (seen.failures, seen.forgotten) == (0, 0), seen.troubles


def event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


@dataclass
class MadeUp:
    """A server that answers as a gateway does, until it has a fault. A token is a character."""

    fault: str = ""
    sessions: dict[str, list[int]] = field(default_factory=dict)
    """By system prompt, the lengths of its prompts."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.fault == "refuses":
            return web.json_response({"error": {"message": "no engine", "type": "server_error"}}, status=503)
        length = sum(len(message["content"]) for message in body["messages"])
        headers = self._headers(body["messages"][0]["content"], length)
        if self.fault == "says nothing of sessions":
            headers = {}
        counted = length - 1 if self.fault == "miscounts" else length
        usage = {"prompt_tokens": counted, "completion_tokens": 1, "total_tokens": counted + 1}
        head = {"id": "1", "created": 1, "model": MODEL}
        if not body["stream"]:
            message = {"role": "assistant", "content": "Yes."}
            reason = None if self.fault == "leaves the end out" else "stop"
            choice = {"index": 0, "finish_reason": reason, "message": message}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole, headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        head["object"] = "chat.completion.chunk"
        delta = {"index": 0, "delta": {"content": "Yes."}, "finish_reason": None}
        await response.write(event({**head, "choices": [delta]}))
        if self.fault == "talks nonsense":
            await response.write(b"data: {\n\n")
        if self.fault == "breaks off":
            assert request.transport is not None
            request.transport.close()
            return response
        if self.fault != "leaves the end out":
            end = {"index": 0, "delta": {}, "finish_reason": "stop"}
            await response.write(event({**head, "choices": [end]}))
        await response.write(event({**head, "choices": [], "usage": usage}))
        if self.fault != "leaves [DONE] out":
            await response.write(b"data: [DONE]\n\n")
        return response

    def _headers(self, session: str, length: int) -> dict[str, str]:
        lengths = self.sessions.setdefault(session, [])
        if self.fault == "forgets":
            lengths.clear()
        again = bool(lengths) and lengths[-1] == length
        history = "grown" if lengths else "new"
        delta = length - (lengths[-1] if lengths else 0)
        if not again:
            lengths.append(length)
        told = {
            "pool": "greedy",
            "reason": "fixed",
            "state": "redis",
            "history": history,
            "turn": len(lengths),
            "delta-tokens": delta,
            "prompt-tokens": length,
        }
        return {f"x-dps-{name}": str(value) for name, value in told.items()}


@asynccontextmanager
async def serving(server: MadeUp) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


BROKEN = {
    "refuses": "status 503",
    "breaks off": "peer closed connection",
    "leaves the end out": "truncated: ",
    "leaves [DONE] out": "truncated: the stream ended without [DONE]",
}


@pytest.mark.parametrize(("fault", "words"), BROKEN.items())
async def test_an_answer_that_is_not_whole_is_a_retry_and_at_last_a_failure(fault: str, words: str) -> None:
    server = MadeUp()
    async with serving(server) as url:

        async def strike() -> None:
            server.fault = fault

        seen = await case(url, strike, attempts=2)

    assert seen.failures > 0
    assert seen.retries >= seen.failures
    assert all(words in trouble for trouble in seen.troubles), seen.troubles


FORGETFUL = {
    "forgets": "new turn 1, ΔL ",
    "says nothing of sessions": "no decision in the answer's headers",
    "miscounts": "prompt tokens, the engine ",
}


@pytest.mark.parametrize(("fault", "words"), FORGETFUL.items())
async def test_a_session_that_is_not_remembered_is_told(fault: str, words: str) -> None:
    server = MadeUp()
    async with serving(server) as url:

        async def strike() -> None:
            server.fault = fault

        seen = await case(url, strike)

    assert seen.forgotten > 0
    assert (seen.retries, seen.failures) == (0, 0)
    assert all(words in trouble for trouble in seen.troubles), seen.troubles


async def test_an_answer_that_nobody_can_read_ends_the_waiting() -> None:
    server = MadeUp()
    async with serving(server) as url:

        async def strike() -> None:
            server.fault = "talks nonsense"

        with pytest.raises(ValueError, match="double quotes"):
            await case(url, strike)
