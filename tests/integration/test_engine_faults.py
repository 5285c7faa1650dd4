"""Engines that freeze, hang, answer garbage or cannot be found.

After each fault no request is in flight, no connection has leaked, and the engines have aborted every request whose
client has left. Each gateway has more faults than connections that it may keep.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dps_local.processes import Child
from dps_testkit.data_plane import CHAT, ENDLESS, ENDLESS_STREAM, SLOW, chat, posted
from dps_testkit.http import metric
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.waiting import wait_until
from tests.integration.leftovers import leaking_no_files, replicas_ready, settled

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

TIMEOUTS = {"connectSeconds": 1, "firstByteSeconds": 5, "idleSeconds": 5, "healthIntervalSeconds": 1}
SECTIONS: dict[str, dict[str, Any]] = {
    "routing": {"thresholdTokens": None, "decisionLog": "/dev/full"},
    "telemetry": {"accessLog": "/dev/full"},
    "timeouts": TIMEOUTS,
}
"""Sends every turn to the speculative pool; the greedy one is only used for failover. The disk for the logs is full."""


@dataclass(frozen=True)
class GatewayWithFaultyEngine:
    """A gateway whose speculative engine will fail."""

    gateway: Gateway
    engine: Engine
    other: Engine

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the engine's process without closing its connections, and let it continue afterwards."""
        self.engine.child.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.engine.child.signal(signal.SIGCONT)

    async def aborted(self) -> float:
        return await metric(self.engine.url, "sglang:num_aborted_requests_total")

    async def recovered(self) -> None:
        """Wait until the engine serves again and nothing is left of earlier requests."""
        await replicas_ready(self.gateway, 2)
        await settled(self.gateway, self.engine, self.other)
        assert await reason(self.gateway) == "within_threshold"


async def reason(gateway: Gateway, **fields: Any) -> str:
    async with posted(gateway.url + CHAT, chat(**fields)) as response:
        await response.read()
        assert response.status == 200
        return response.headers["x-dps-reason"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faulty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayWithFaultyEngine]:
    async with LocalProcesses(tmp_path_factory.mktemp("faulty")) as processes:
        engine, other = await processes.start_engines("speculative", "greedy", arguments=SLOW)
        gateway = await processes.start_gateway([engine], [other], SECTIONS)
        async with leaking_no_files(gateway):
            yield GatewayWithFaultyEngine(gateway, engine, other)


async def test_stream_of_an_engine_that_freezes_before_it_answers_fails_over(
    faulty: GatewayWithFaultyEngine,
) -> None:
    """The frozen engine finds the request when it continues, but must not generate an answer for it."""
    with faulty.frozen():
        async with posted(faulty.gateway.url + CHAT, ENDLESS_STREAM) as response:
            assert response.headers["x-dps-reason"] == "failover"
        await settled(faulty.gateway)
    await faulty.recovered()


async def test_engine_aborts_the_request_of_a_client_that_left_before_the_first_byte(
    faulty: GatewayWithFaultyEngine,
) -> None:
    aborted = await faulty.aborted()

    async def running() -> bool:
        return await faulty.engine.running() == 1

    async def answered() -> None:
        async with posted(faulty.gateway.url + CHAT, ENDLESS) as response:
            await response.read()

    request = asyncio.create_task(answered())
    await wait_until(running, "the engine has begun to execute the request")
    with faulty.frozen():
        request.cancel()
        await asyncio.wait([request])
        await settled(faulty.gateway)
    await faulty.recovered()
    assert await faulty.aborted() == aborted + 1


async def test_full_disk_loses_log_lines_but_no_requests(faulty: GatewayWithFaultyEngine) -> None:
    await reason(faulty.gateway)

    async def dropped() -> bool:
        names = ("dps_access_log_dropped_total", "dps_decision_log_dropped_total")
        return min([await faulty.gateway.metric(name) for name in names]) > 0

    await wait_until(dropped, "the entries are dropped")
    assert faulty.gateway.child.log.read_text().count("log /dev/full cannot be written") == 2
    await faulty.recovered()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


class GarbageEngine:
    """An engine that passes health checks and answers chat requests with `answer`, or not at all if it is empty."""

    def __init__(self) -> None:
        self.answer = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                writer.write(OK)
            writer.write(self.answer)
            await writer.drain()
            if not self.answer:
                await reader.read()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


@dataclass(frozen=True)
class GatewayWithGarbageEngine:
    """A gateway whose speculative engine answers garbage. Its name has to be resolved."""

    gateway: Gateway
    garbage: GarbageEngine

    async def reason(self, answer: bytes, **fields: Any) -> str:
        self.garbage.answer = answer
        result = await reason(self.gateway, **fields)
        await self.recovered()
        return result

    async def recovered(self) -> None:
        """Wait until a health check has found the engine available again, and nothing is left of earlier requests."""
        await settled(self.gateway)
        await replicas_ready(self.gateway, 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted(
    engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayWithGarbageEngine]:
    garbage = GarbageEngine()
    server = await asyncio.start_server(garbage.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with LocalProcesses(tmp_path_factory.mktemp("scripted")) as processes:
        gateway = await processes.start_gateway(
            [scripted_engine(f"http://localhost:{port}")], [engines[1]], SECTIONS
        )
        async with leaking_no_files(gateway):
            yield GatewayWithGarbageEngine(gateway, garbage)
    server.close()


def scripted_engine(url: str) -> Engine:
    async def never() -> bool:
        return False

    return Engine(Child("scripted", [], Path(), never), url)


BEFORE_THE_ANSWER = {
    "not HTTP": b"\x00\xff garbage\r\n\r\n",
    "invalid header": b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    "endless header": b"HTTP/1.1 200 OK\r\nx: " + b"x" * 100_000,
    "invalid chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "status without a body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n",
}
DURING_THE_ANSWER = {
    "event that is not JSON": EVENTS + b"Content-Length: 11\r\n\r\ndata: {{{\n\n",
    "bytes that are not UTF-8": EVENTS + b"Content-Length: 10\r\n\r\ndata: \xff\xfe\n\n",
}


@pytest.mark.parametrize("answer", BEFORE_THE_ANSWER.values(), ids=BEFORE_THE_ANSWER)
async def test_request_to_an_engine_that_answers_garbage_fails_over(
    scripted: GatewayWithGarbageEngine, answer: bytes
) -> None:
    assert await scripted.reason(answer) == "failover"


@pytest.mark.parametrize("answer", DURING_THE_ANSWER.values(), ids=DURING_THE_ANSWER)
async def test_garbage_in_a_stream_ends_it_with_an_error_event(
    scripted: GatewayWithGarbageEngine, answer: bytes
) -> None:
    scripted.garbage.answer = answer
    async with posted(scripted.gateway.url + CHAT, chat(stream=True)) as response:
        assert response.headers["x-dps-reason"] == "within_threshold"
        assert b"upstream_broken" in await response.read()
    await scripted.recovered()
    assert "Traceback" not in scripted.gateway.child.log.read_text()


async def test_stream_on_a_half_open_connection_fails_over(scripted: GatewayWithGarbageEngine) -> None:
    assert await scripted.reason(b"", stream=True) == "failover"


async def test_engine_whose_name_cannot_be_resolved_is_unreachable(
    scripted: GatewayWithGarbageEngine,
) -> None:
    def rename(configuration: dict[str, Any]) -> None:
        configuration["pools"]["speculative"]["endpoints"] = ["http://engine.invalid:30000"]

    scripted.gateway.configure(rename)
    await replicas_ready(scripted.gateway, 0, pool="speculative")
    assert await reason(scripted.gateway) == "failover"
    await settled(scripted.gateway)
