"""Bodies that arrive slowly, and the memory for the bodies of all requests together."""

import asyncio
import json
import time

import pytest

from dps_gateway.api.call import TIMEOUT_HEADER
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, PolicyInput, Reason
from dps_testkit.in_process_gateway import CHAT, HeldAnswers, InProcessGateway, ScriptedEngine, chat
from tests.gateway.servers import configure, until

EMBEDDINGS = "/v1/embeddings"


class Upload:
    """A request whose body is sent in parts."""

    def __init__(self, gateway: InProcessGateway, path: str, size: int, headers: str = "") -> None:
        self._port = gateway.port
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n"
        self._head = f"{head}{headers}\r\n"

    async def begin(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        await self.send(self._head.encode())

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """The status and the body of the response."""
        async with asyncio.timeout(30):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            body = await self._reader.readexactly(int(length))
        self._writer.close()
        return int(head.split()[1]), body

    def abandon(self) -> None:
        assert self._writer.transport is not None
        self._writer.transport.abort()


async def buffered(gateway: InProcessGateway, size: int) -> None:
    """Return when this many bytes of bodies are in memory."""
    await until(lambda: gateway.runtime.bodies.used == size, f"{size} bytes are buffered")


@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
async def test_body_that_arrives_too_slowly_is_refused(
    gateway: InProcessGateway, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dps_gateway.api.call.BODY_GRACE_SECONDS", 0.2)
    configure(gateway.runtime, "limits", min_body_bytes_per_second=1000)
    upload = Upload(gateway, path, 500)
    await upload.begin()
    began = asyncio.get_running_loop().time()
    refused = asyncio.create_task(upload.answer())
    while not refused.done():
        await upload.send(b" ")
        await asyncio.wait([refused], timeout=0.02)
    status, body = await refused
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert 0.2 <= asyncio.get_running_loop().time() - began < 5


class SlowPolicy:
    """Takes longer for a decision than the client allows for the request."""

    def decide(self, turn: PolicyInput, /) -> Decision:
        time.sleep(0.2)
        return Decision(Pool.GREEDY, Reason.FIXED)


@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
async def test_clients_deadline_limits_the_time_for_the_body(gateway: InProcessGateway, path: str) -> None:
    upload = Upload(gateway, path, 500, f"{TIMEOUT_HEADER}: 200\r\n")
    await upload.begin()
    began = asyncio.get_running_loop().time()
    status, body = await upload.answer()
    assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
    assert 0.15 <= asyncio.get_running_loop().time() - began < 5


async def test_request_is_not_sent_to_an_engine_after_its_deadline(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    gateway.runtime.policy = SlowPolicy()
    response, content = await gateway.post(json=chat(), headers={TIMEOUT_HEADER: "100"})
    assert (response.status, json.loads(content)["error"]["code"]) == (504, "deadline_exceeded")
    assert engine.requests == []


@pytest.mark.parametrize("rate", [100, 0])
async def test_body_that_arrives_at_the_minimum_rate_is_accepted(
    gateway: InProcessGateway, rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dps_gateway.api.call.BODY_GRACE_SECONDS", 1.0)
    configure(gateway.runtime, "timeouts", body_seconds=30.0)
    configure(gateway.runtime, "limits", min_body_bytes_per_second=rate)
    body = json.dumps(chat()).encode()
    upload = Upload(gateway, CHAT, len(body) + 300)
    await upload.begin()
    for _ in range(10):
        await upload.send(b" " * 30)
        await asyncio.sleep(0.15)
    await upload.send(body)
    assert (await upload.answer())[0] == 200


@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
async def test_body_for_which_there_is_no_memory_is_refused(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str
) -> None:
    configure(gateway.runtime, "limits", max_body_bytes=1000, max_buffered_bytes=1500)
    first = Upload(gateway, CHAT, 1000)
    await first.begin()
    await first.send(b" " * 900)
    await buffered(gateway, 900)
    response, content = await gateway.post(
        path, data=b" " * 700, headers={"Content-Type": "application/json"}
    )
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert json.loads(content)["error"]["code"] == "gateway_overloaded"
    await buffered(gateway, 900)
    assert (await gateway.post(path, json=chat()))[0].status == 200
    first.abandon()
    await buffered(gateway, 0)
    assert len(engine.requests) == 1


async def test_body_counts_until_its_request_has_ended(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.answer = held = HeldAnswers()
    body = json.dumps(chat()).encode()
    configure(gateway.runtime, "limits", max_body_bytes=len(body), max_buffered_bytes=1)
    first = asyncio.create_task(gateway.post(data=body, headers={"Content-Type": "application/json"}))
    await buffered(gateway, len(body))
    assert (await gateway.post(json=chat()))[0].status == 503
    held.release.set()
    assert (await first)[0].status == 200
    assert gateway.runtime.bodies.used == 0
    assert (await gateway.post(json=chat()))[0].status == 200


async def test_refused_and_oversized_bodies_leave_nothing_behind(gateway: InProcessGateway) -> None:
    configure(gateway.runtime, "limits", max_body_bytes=1000)
    assert (await gateway.post(data=b"{"))[0].status == 400
    assert (await gateway.post(data=b"{" * 2000))[0].status == 413
    assert gateway.runtime.bodies.used == 0
