"""Arbitrary bytes and arbitrary JSON on the public port cause no 5xx response, and leave nothing behind: no request in
flight, no open file, and no metrics of their own."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_gateway.api.endpoints import ROUTES
from dps_gateway.api.public import public_app
from dps_gateway.api.server import Runner
from dps_gateway.config import GatewayConfig
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.runtime import Runtime
from dps_local.assets import bundled_tokenizer
from dps_testkit.waiting import eventually_async

TIMEOUT_SECONDS = 60.0
READ_SECONDS = 0.02
CLOSE_SECONDS = 5.0


class FuzzedGateway:
    """A gateway in this process, in front of an engine that accepts everything."""

    def __init__(self, loop: asyncio.Runner) -> None:
        self._loop = loop
        loop.run(self._start())

    async def _start(self) -> None:
        async def accept(request: web.Request) -> web.StreamResponse:
            return web.json_response({"choices": []})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", accept)
        self._engine = TestServer(app)
        await self._engine.start_server()
        pool = {"endpoints": [str(self._engine.make_url(""))]}
        config = GatewayConfig.model_validate(
            {"model": {"name": "m", "tokenizer": "x"}, "pools": {"speculative": pool, "greedy": pool}}
        )
        self._runtime = Runtime(config, Tokenizer.load(str(bundled_tokenizer())))
        self._port = unused_port()
        self._runner = Runner(
            public_app(self._runtime), clients=self._runtime.clients, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._http = aiohttp.ClientSession()

    def send(self, data: bytes) -> bytes:
        """All responses to raw bytes, until the gateway has closed the connection.

        The client ends the request after a short time without a response, because the gateway rightly waits for the
        rest of most of these requests. Raises TimeoutError if the gateway does not close the connection then.
        """

        async def exchange() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            received = b""
            with suppress(OSError):  # the gateway has closed the connection
                writer.write(data)
                await writer.drain()
                with suppress(TimeoutError):
                    while chunk := await asyncio.wait_for(reader.read(65536), READ_SECONDS):
                        received += chunk
                writer.write_eof()
                async with asyncio.timeout(CLOSE_SECONDS):
                    received += await reader.read()
            writer.close()
            return received

        return self._loop.run(exchange())

    def metric_series(self) -> set[tuple[str, ...]]:
        """The time series of the gateway, each by its name and its labels except for statuses."""
        samples = (each for family in self._runtime.metrics.registry.collect() for each in family.samples)
        return {
            (each.name, *(value for label, value in sorted(each.labels.items()) if label != "status"))
            for each in samples
        }

    def post(self, path: str, body: Any) -> int:
        """The status of the response to a JSON document."""

        async def exchange() -> int:
            url = f"http://127.0.0.1:{self._port}{path}"
            async with (
                asyncio.timeout(TIMEOUT_SECONDS),
                self._http.post(url, data=json.dumps(body)) as response,
            ):
                await response.read()
                return response.status

        return self._loop.run(exchange())

    def wait_until_idle(self) -> None:
        """Wait until no client is connected and no request is in flight."""

        async def idle() -> None:
            assert len(self._runtime.clients) == 0
            assert [pool.in_flight for pool in self._runtime.pools.values()] == [0, 0]

        async def wait() -> None:
            await self._http.close()
            await eventually_async(idle)

        self._loop.run(wait())

    def stop(self) -> None:
        async def stop() -> None:
            await self._http.close()
            await self._runner.cleanup()
            await self._runtime.close()
            await self._engine.close()

        self._loop.run(stop())


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[FuzzedGateway]:
    with asyncio.Runner() as loop:
        gateway = FuzzedGateway(loop)
        for path in (*(route.path for route in ROUTES), "/v1/embeddings"):
            gateway.post(path, {"messages": [{"role": "user", "content": "hello"}]})
        files, series = _open_files(), gateway.metric_series()
        yield gateway
        gateway.wait_until_idle()
        assert _open_files() <= files
        assert gateway.metric_series() <= series
        gateway.stop()


def _open_files() -> int:
    """The number of file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


CHAT = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
VALID = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(CHAT), CHAT)
)
TOKENS = [b"\r\n", b"\x00", b"\xff", b" ", b":", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"]
TOKENS += [b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n", b"Priority: u=\xb2\r\n", b"HTTP/9.9"]
MUTATIONS = st.tuples(st.integers(0, len(VALID)), st.integers(0, 20), st.sampled_from(TOKENS) | st.binary())

EXTREMES = st.sampled_from(["\ud800", "\x00", 10**40, -1, 1e308, json.loads("[" * 100 + "]" * 100)])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | EXTREMES
VALUES = st.recursive(
    SCALARS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "tool"]) | VALUES,
            "content": VALUES,
            "tool_calls": VALUES,
        },
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m") | VALUES,
        "messages": MESSAGES | VALUES,
        "input": MESSAGES | VALUES,
        "prompt": VALUES,
        "text": VALUES,
        "input_ids": VALUES,
        "system": VALUES,
        "tools": VALUES,
        "stream_options": VALUES,
        "metadata": VALUES,
        "conversation": VALUES,
        "previous_response_id": VALUES,
        "lora_path": VALUES,
        "cache_salt": VALUES,
    },
)


@settings(max_examples=60)
@given(st.lists(MUTATIONS, min_size=1, max_size=4))
def test_bytes_that_resemble_a_request(
    fuzzed: FuzzedGateway, mutations: list[tuple[int, int, bytes]]
) -> None:
    data = VALID
    for start, removed, inserted in mutations:
        data = data[:start] + inserted + data[start + removed :]
    assert b"HTTP/1.1 5" not in fuzzed.send(data)


@settings(max_examples=150)
@given(st.sampled_from([route.path for route in ROUTES]), BODIES | VALUES)
def test_any_json_document(fuzzed: FuzzedGateway, path: str, body: Any) -> None:
    assert fuzzed.post(path, body) < 500


def test_ordinary_request_is_served(fuzzed: FuzzedGateway) -> None:
    assert fuzzed.post("/v1/chat/completions", json.loads(CHAT)) == 200
