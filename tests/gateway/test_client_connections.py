"""Client connections: their number, and clients that send their requests slowly or not at all."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from dps_gateway.api.listener import Site
from dps_gateway.api.public import public_app
from dps_gateway.api.server import Runner
from dps_gateway.client_connections import ClientConnections
from dps_gateway.config import GatewayConfig
from dps_gateway.runtime import Runtime
from dps_testkit.clock import ManualClock
from dps_testkit.tokenizers import shared_tokenizer
from dps_testkit.waiting import wait_until

CHAT = "/v1/chat/completions"
HEADER_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 600.0


class RecordedConnection:
    """A connection that records that it was dropped."""

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


class Server:
    """The connections of a server that accepts at most three at once."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.closed: Counter[str] = Counter()
        self.connections = ClientConnections(
            lambda: 3,
            lambda: HEADER_SECONDS,
            lambda: KEEP_ALIVE_SECONDS,
            lambda reason: self.closed.update([reason]),
            self.clock,
        )

    def open(self) -> RecordedConnection:
        connection = RecordedConnection()
        assert self.connections.opened(connection)
        self.clock.now += 1
        return connection


def test_connection_without_a_request_is_closed_in_time() -> None:
    server = Server()
    silent, answered, busy = server.open(), server.open(), server.open()
    for connection in (answered, busy):
        server.connections.began(connection)
    server.connections.ended(answered)
    server.clock.now += HEADER_SECONDS
    server.connections.expire()
    assert [each.dropped for each in (silent, answered, busy)] == [True, False, False]
    assert (server.closed, len(server.connections)) == ({"timeout": 1}, 2)


def test_second_request_on_a_connection_must_arrive_in_time_once_it_has_begun() -> None:
    server = Server()
    connection = server.open()
    server.connections.began(connection)
    server.connections.ended(connection)
    server.clock.now += 10 * HEADER_SECONDS
    server.connections.received(connection)
    server.clock.now += HEADER_SECONDS / 2
    server.connections.received(connection)
    server.connections.expire()
    assert not connection.dropped
    server.clock.now += HEADER_SECONDS / 2
    server.connections.expire()
    assert connection.dropped


def test_connection_without_another_request_is_closed_in_time() -> None:
    server = Server()
    answered, busy = server.open(), server.open()
    for connection in (answered, busy):
        server.connections.began(connection)
    server.connections.ended(answered)
    server.clock.now += KEEP_ALIVE_SECONDS - 1
    server.connections.expire()
    assert not answered.dropped
    server.clock.now += 1
    server.connections.expire()
    assert [each.dropped for each in (answered, busy)] == [True, False]
    assert (server.closed, len(server.connections)) == ({"idle": 1}, 1)


def test_new_connection_replaces_the_oldest_one_without_a_request() -> None:
    server = Server()
    answered, second, third = server.open(), server.open(), server.open()
    server.connections.began(answered)
    server.connections.ended(answered)
    busy = server.open()
    assert [each.dropped for each in (answered, second, third)] == [False, True, False]
    server.connections.began(busy)
    server.connections.began(third)
    server.open()
    assert [each.dropped for each in (answered, third, busy)] == [True, False, False]
    assert server.closed == {"evicted": 2}


def test_new_connection_is_refused_while_all_others_are_in_use() -> None:
    server = Server()
    for connection in (server.open(), server.open(), server.open()):
        server.connections.began(connection)
    assert not server.connections.opened(RecordedConnection())
    assert (server.closed, len(server.connections)) == ({"refused": 1}, 3)
    server.connections.closed(connection)
    server.open()


class Gateway:
    """A gateway in this process whose engine answers once `answer` is set."""

    def __init__(self, runtime: Runtime, port: int, answer: asyncio.Event) -> None:
        self.runtime = runtime
        self.port = port
        self.answer = answer

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        return reader, writer


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    answer = asyncio.Event()

    async def engine(request: web.Request) -> web.StreamResponse:
        await answer.wait()
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine)
    port = unused_port()
    async with TestServer(app) as server:
        pool = {"endpoints": [str(server.make_url(""))]}
        config = GatewayConfig.model_validate(
            {
                "model": {"name": "m", "tokenizer": "x"},
                "pools": {"speculative": pool, "greedy": pool},
                "limits": {"maxConnections": 1},
                "timeouts": {"headerSeconds": 0.1, "bodySeconds": 0.1, "keepAliveSeconds": 0.1},
            }
        )
        runtime = Runtime(config, shared_tokenizer())
        runner = Runner(public_app(runtime), clients=runtime.clients, handler_cancellation=True)
        await runner.setup()
        await Site(runner, "127.0.0.1", port, backlog=8).start()
        yield Gateway(runtime, port, answer)
        answer.set()
        await runner.cleanup()
        await runtime.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"])
async def test_client_that_sends_no_complete_head_is_disconnected(gateway: Gateway, sent: bytes) -> None:
    reader, writer = await gateway.connect(sent)
    await asyncio.sleep(0.2)
    gateway.runtime.clients.expire()
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_idle_client_is_disconnected(gateway: Gateway) -> None:
    reader, writer = await gateway.connect(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    await reader.readuntil(b"}")
    await asyncio.sleep(0.2)  # longer than timeouts.keepAliveSeconds
    gateway.runtime.clients.expire()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_body_that_does_not_arrive_is_refused(gateway: Gateway) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()
    reader, writer = await gateway.connect(head)
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    writer.close()


async def test_client_beyond_the_limit_receives_503_and_the_others_are_served(gateway: Gateway) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    url = f"http://127.0.0.1:{gateway.port}{CHAT}"

    async def post() -> tuple[int, str | None]:
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            await response.read()
            return response.status, response.headers.get("Retry-After")

    first = asyncio.create_task(post())

    async def waiting_for_the_engine() -> bool:
        return any(pool.in_flight for pool in gateway.runtime.pools.values())

    await wait_until(waiting_for_the_engine, "the first request reaches the engine")
    assert await post() == (503, "1")
    gateway.answer.set()
    assert await first == (200, None)
