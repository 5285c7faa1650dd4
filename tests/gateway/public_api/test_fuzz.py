"""Bytes that resemble a request cause no 5xx response, and leave nothing behind: no request in flight, no open file and
no metrics of their own. tests/integration/test_openapi.py sends arbitrary documents."""

import asyncio
import json
import os
import random
from contextlib import suppress

import pytest

from dps_gateway.api.endpoints import ENDPOINTS
from dps_testkit.in_process_gateway import CHAT, InProcessGateway, chat
from dps_testkit.waiting import eventually_async

READ_SECONDS = 0.02
CLOSE_SECONDS = 5.0
REQUESTS = 60

BODY = json.dumps(chat()).encode()
VALID = (
    f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
).encode() + BODY
TOKENS = [b"\r\n", b"\x00", b"\xff", b" ", b":", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"]
TOKENS += [b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n", b"Priority: u=\xb2\r\n", b"HTTP/9.9"]


def mutated(rng: random.Random) -> bytes:
    """A valid request with up to four replacements."""
    data = VALID
    for _ in range(rng.randint(1, 4)):
        start, removed = rng.randrange(len(VALID)), rng.randrange(21)
        data = (
            data[:start] + rng.choice([*TOKENS, rng.randbytes(rng.randrange(20))]) + data[start + removed :]
        )
    return data


async def send(port: int, data: bytes) -> bytes:
    """All responses to raw bytes, until the gateway has closed the connection.

    The client ends the request after a short time without a response, because the gateway rightly waits for the rest of
    most of these requests. Raises TimeoutError if the gateway does not close the connection then.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
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


def metric_series(gateway: InProcessGateway) -> set[tuple[str, ...]]:
    """The time series of the gateway, each by its name and its labels except for statuses."""
    samples = (each for family in gateway.runtime.metrics.registry.collect() for each in family.samples)
    return {
        (each.name, *(value for label, value in sorted(each.labels.items()) if label != "status"))
        for each in samples
    }


def open_files() -> int:
    """The number of file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("seed", range(2))
async def test_bytes_that_resemble_a_request(gateway: InProcessGateway, seed: int) -> None:
    rng = random.Random(seed)
    for path in (*(route.path for route in ENDPOINTS), "/v1/embeddings"):
        await gateway.post(path, json=chat())
    files, series = open_files(), metric_series(gateway)
    for _ in range(REQUESTS):
        data = mutated(rng)
        assert b"HTTP/1.1 5" not in await send(gateway.port, data), data

    async def idle() -> None:
        assert [pool.in_flight for pool in gateway.runtime.pools.values()] == [0, 0]
        assert open_files() <= files

    await eventually_async(idle)
    assert metric_series(gateway) <= series
    assert (await gateway.post(json=chat()))[0].status == 200
