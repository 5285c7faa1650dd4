"""Answers, errors and interrupted streams of an engine, as the client receives them."""

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dps_gateway.api.sse import MAX_HELD_BYTES
from dps_gateway.upstream import exchange
from dps_gateway.upstream.replica import ERRORS_TO_EJECT
from dps_testkit.in_process_gateway import (
    CHAT,
    CHUNK,
    DONE,
    InProcessGateway,
    ScriptedEngine,
    chat,
    message_of,
)
from dps_testkit.waiting import PATIENCE_SECONDS
from tests.gateway.open_files import no_free_files
from tests.gateway.servers import configure, until


async def test_engine_address_is_removed_from_redirects(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.respond(status=307, headers={"Location": "http://10.0.0.1:30000/v1/models?a=1"})
    response, _ = await gateway.send("GET", "/v1/models/", allow_redirects=False)
    assert response.headers["Location"] == "/v1/models?a=1"


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"object":"error","message":"too long","type":"BadRequestError","code":400}', "too long"),
        ('{"detail":"Not Found"}', "Not Found"),
        ("plain text", "plain text"),
        ("", "the engine answered 400"),
        ('{"error":{"message":"as is","type":"t","param":null,"code":null}}', "as is"),
    ],
)
async def test_error_of_the_engine_becomes_an_openai_error_object(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str, body: str, message: str
) -> None:
    engine.respond(status=400, text=body)
    response, content = await gateway.post(path, json=chat())
    assert (response.status, response.content_type) == (400, "application/json")
    assert message_of(content) == message
    assert response.headers["x-dps-pool"]


async def test_retry_after_of_the_engine_is_relayed(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.respond(status=503, text="loading", headers={"Retry-After": "17"})
    response, content = await gateway.post(json=chat())
    assert (response.status, response.headers["Retry-After"]) == (503, "17")
    assert message_of(content) == "loading"
    assert {"x-dps-pool", "x-dps-prompt-tokens", "x-dps-session"} <= {
        name.lower() for name in response.headers
    }


async def test_engine_is_not_blamed_if_the_gateway_cannot_open_a_connection(
    gateway: InProcessGateway, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.send("GET", "/version")  # opens the client's connection
    with no_free_files():
        await gateway.post(json=chat())
        response, content = await gateway.post(json=chat())
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert errors == ["no file descriptor is free for a connection to an engine"]
    assert (response.status, response.headers["Retry-After"], engine.requests) == (503, "1", [])
    assert json.loads(content)["error"]["code"] == "gateway_overloaded"
    assert [len(pool.ready) for pool in gateway.runtime.pools.values()] == [1, 1]
    response, _ = await gateway.post(json=chat())
    assert (response.status, response.headers["x-dps-reason"]) == (200, "within_threshold")


async def request_on_a_connection(
    gateway: InProcessGateway, limit: int = 2**16, **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a chat request on a connection of its own, of whose answer at most about `limit` bytes are read ahead."""
    body = json.dumps(chat(**fields)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=limit)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def test_answer_is_counted_if_the_client_closes_after_the_last_byte(
    gateway: InProcessGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrected = []

    async def correct(*arguments: object, continued: bool) -> bool:
        await asyncio.sleep(0.05)  # Redis takes time, in which the client may leave
        corrected.append(arguments)
        return False

    monkeypatch.setattr(gateway.runtime.turns, "correct", correct)
    for _ in range(10):
        reader, writer = await request_on_a_connection(gateway)
        await reader.readuntil(b"}}")
        writer.transport.abort()
    await until(lambda: gateway.requests(200) + gateway.requests(499) == 10, "all requests are counted")
    assert (gateway.requests(200), gateway.requests(499)) == (10, 0)
    labels = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "m"}
    name = "gen_ai_server_request_duration_seconds_count"
    assert gateway.runtime.metrics.registry.get_sample_value(name, labels) == 10
    assert len(corrected) == 10


async def test_connection_broken_after_done_is_a_complete_answer(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.stream(CHUNK, DONE, abort=True)
    _, content = await gateway.post(json=chat(stream=True))
    assert content == CHUNK + DONE


NOT_CONTINUED = chat(stream=True, logprobs=True)
"""A request whose stream no other engine continues."""


async def test_stream_that_ends_without_done_ends_with_an_error_event(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.stream(CHUNK)
    _, content = await gateway.post(json=NOT_CONTINUED)
    assert content.startswith(CHUNK)
    assert message_of(content.removeprefix(CHUNK + b"data: ")) == "the engine ended the stream without [DONE]"


@pytest.mark.parametrize("limit", ["total_seconds", "idle_seconds"])
async def test_client_that_stops_reading_is_disconnected(
    gateway: InProcessGateway, engine: ScriptedEngine, limit: str
) -> None:
    configure(gateway.runtime, "timeouts", **{limit: 2.0})
    engine.stream(*[b"data: " + b"x" * 500_000 + b"\n\n"] * 100, DONE)
    stream, aborted = engine.answer, asyncio.Event()

    async def observed(request: web.Request) -> web.StreamResponse:
        try:
            return await stream(request)
        except (ConnectionResetError, asyncio.CancelledError):
            aborted.set()
            raise

    engine.answer = observed
    _, writer = await request_on_a_connection(gateway, limit=1, stream=True)
    await until(lambda: gateway.requests(499) == 1, "the gateway closes the connection")
    assert sum(pool.in_flight for pool in gateway.runtime.pools.values()) == 0
    await asyncio.wait_for(aborted.wait(), PATIENCE_SECONDS)
    writer.transport.abort()


async def test_client_that_reads_a_complete_answer_slowly_occupies_no_slot(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.respond(text=json.dumps({"choices": ["x" * 40_000_000]}), content_type="application/json")
    reader, writer = await request_on_a_connection(gateway, limit=1)
    assert await reader.read(1) == b"H"
    assert sum(pool.in_flight for pool in gateway.runtime.pools.values()) == 0
    assert gateway.requests(200) == 0
    writer.transport.abort()


async def test_client_that_reads_a_long_answer_slowly_receives_all_of_it(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    """It takes longer than the client may read nothing."""
    configure(gateway.runtime, "timeouts", idle_seconds=2.0)
    text = "x" * 20_000_000
    engine.respond(text=json.dumps({"choices": [text]}), content_type="application/json")
    received = 0
    async with gateway.client.post(gateway.url + CHAT, json=chat(), read_bufsize=1000) as response:
        async for chunk in response.content.iter_chunked(1_000_000):
            received += len(chunk)
            await asyncio.sleep(0.01 + len(chunk) / 5_000_000)
    assert received == len(text) + len('{"choices": [""]}') == response.content_length


async def test_answer_without_an_end_is_not_kept_in_memory(
    gateway: InProcessGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_ANSWER_BYTES", 1_000_000)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b" " * 100_000)
            await asyncio.sleep(0)

    engine.answer = endless
    response, content = await gateway.post(json=chat())
    assert (response.status, message_of(content)) == (502, "the answer is longer than 1000000 bytes")
    assert len(engine.requests) == 1
    assert all(pool.ready for pool in gateway.runtime.pools.values())


STALL_SECONDS = 60


def stall_after(gateway: InProcessGateway, engine: ScriptedEngine, first: bytes, kind: str) -> None:
    """Let the engine send nothing after the first part of an answer, and the gateway wait for 0.5 s."""

    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        await response.write(first)
        await asyncio.sleep(STALL_SECONDS)
        return response

    engine.answer = stall
    configure(gateway.runtime, "timeouts", idle_seconds=0.5)


BEGUN = b'data: {"type":"response.created","response":{"id":"r","object":"response"}}\n\n'
"""SGLang sends this event before it computes the prompt."""


async def test_prefill_after_the_first_event_of_a_stream_may_take_longer_than_the_idle_timeout(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    ending = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'

    async def prefill(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(BEGUN)
        await asyncio.sleep(0.6)
        await response.write(ending)
        return response

    engine.answer = prefill
    configure(gateway.runtime, "timeouts", idle_seconds=0.2)
    response, content = await gateway.post("/v1/responses", json={"input": "hello", "stream": True})
    assert (response.status, content, len(engine.requests)) == (200, BEGUN + ending, 1)


async def test_stream_without_content_fails_after_the_first_byte_timeout(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    stall_after(gateway, engine, BEGUN, "text/event-stream")
    configure(gateway.runtime, "timeouts", first_byte_seconds=0.6)
    async with asyncio.timeout(STALL_SECONDS / 2):
        response, content = await gateway.post("/v1/responses", json={"input": "hello", "stream": True})
    assert (response.status, len(engine.requests)) == (502, 2)
    assert message_of(content) == "the engine did not begin to answer in time"


async def test_stream_without_content_is_sent_to_another_engine_if_its_own_hangs(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    stall_after(gateway, engine, BEGUN, "text/event-stream")
    configure(gateway.runtime, "timeouts", idle_seconds=STALL_SECONDS)
    body = {"input": "hello", "stream": True}
    answer = asyncio.create_task(gateway.post("/v1/responses", json=body))
    pools = gateway.runtime.pools.values()

    def begun() -> bool:
        return any(replica.begun_tokens for pool in pools for replica in pool.replicas.values())

    await until(begun, "the stream has begun")
    ending = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
    engine.stream(ending)
    for pool in pools:
        for replica in pool.replicas.values():
            if replica.in_flight:
                pool.mark_hung(replica)
    async with asyncio.timeout(STALL_SECONDS / 2):
        response, content = await answer
    assert (response.status, content) == (200, ending)


async def test_answer_that_stalls_after_its_first_bytes_fails_after_the_idle_timeout(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    stall_after(gateway, engine, b"{", "application/json")
    response, content = await gateway.post(json=chat())
    assert (response.status, message_of(content)) == (502, "the engine sent nothing for 0.5 s")


async def test_error_event_of_a_relayed_stream_is_separate_from_an_incomplete_event(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.stream(b'data: {"a": 1}\n\ndata: {"b', abort=True)
    _, content = await gateway.post("/v1/audio/speech", json={"model": "m"})
    complete, incomplete, event = content.decode().strip().split("\n\n")
    assert (complete, incomplete) == ('data: {"a": 1}', 'data: {"b')
    assert message_of(event.removeprefix("data: ").encode())


async def test_error_event_of_a_routed_stream_is_separate_from_an_incomplete_long_event(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    incomplete = b'data: {"a": "' + b"a" * MAX_HELD_BYTES
    engine.stream(CHUNK, incomplete, abort=True)
    _, content = await gateway.post(json=NOT_CONTINUED)
    *_, rest, event = content.strip().split(b"\n\n")
    assert rest == incomplete
    assert message_of(event.removeprefix(b"data: "))


async def test_relayed_answer_that_stalls_after_its_first_bytes_is_broken_off_after_the_idle_timeout(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    stall_after(gateway, engine, b"{", "application/json")
    async with asyncio.timeout(STALL_SECONDS / 2):
        with pytest.raises(aiohttp.ClientError):
            await gateway.post("/v1/embeddings", json=chat())


async def test_replica_whose_streams_stall_is_ejected(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    stall_after(gateway, engine, CHUNK, "text/event-stream")
    for _, content in await asyncio.gather(
        *(gateway.post(json=NOT_CONTINUED) for _ in range(ERRORS_TO_EJECT))
    ):
        error = content.removeprefix(CHUNK + b"data: ")
        assert message_of(error) == "the engine sent nothing for 0.5 s"
    assert len(engine.requests) == ERRORS_TO_EJECT
    assert [pool.ready for pool in gateway.runtime.pools.values()].count([]) == 1


CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1","object":"response",'
CREATED_END = b'"status":"in_progress","usage":null}}\n\n'


async def test_response_can_be_cancelled_while_it_is_streamed(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    cancelled = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/responses/resp_1/cancel":
            cancelled.set()
            return web.json_response({"id": "resp_1", "status": "cancelled"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(CREATED)
        await asyncio.sleep(0.1)
        await response.write(CREATED_END)
        await cancelled.wait()
        await response.write(b'event: response.failed\ndata: {"type":"response.failed"}\n\n')
        return response

    engine.answer = answer
    body = {"model": "m", "input": "hello", "stream": True, "background": True}
    async with gateway.client.post(f"{gateway.url}/v1/responses", json=body) as stream:
        assert await stream.content.readuntil(b"\n\n") == CREATED + CREATED_END
        response, _ = await gateway.post("/v1/responses/resp_1/cancel")
        assert response.status == 200
        assert b"response.failed" in await stream.content.read()


async def test_streamed_response_that_is_not_stored_stays_unknown(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.stream(CREATED + CREATED_END, b'event: response.failed\ndata: {"type":"response.failed"}\n\n')
    await gateway.post("/v1/responses", json={"model": "m", "input": "hello", "stream": True, "store": False})
    response, _ = await gateway.send("GET", "/v1/responses/resp_1")
    assert response.status == 404
