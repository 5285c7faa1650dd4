"""What of a request reaches the engine, and the limit of its size."""

import asyncio
import gzip
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dps_gateway.auth import Keys
from dps_gateway.config import GatewayConfig
from dps_testkit.in_process_gateway import CHAT, InProcessGateway, ScriptedEngine, chat, message_of


async def test_compressed_body_is_forwarded_without_its_encoding(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    body = json.dumps(chat()).encode()
    headers = {"Content-Encoding": "gzip"}
    response, _ = await gateway.post(data=gzip.compress(body), headers=headers)
    assert response.status == 200
    assert "content-encoding" not in engine.requests[0][1]
    assert engine.requests[0][2] == body


async def test_decompressed_body_counts_against_the_limit(gateway: InProcessGateway) -> None:
    body = gzip.compress(b"x" * 200_000)
    response, _ = await gateway.post(data=body, headers={"Content-Encoding": "gzip"})
    assert response.status == 413


async def test_body_size_limit_can_be_reloaded(gateway: InProcessGateway) -> None:
    data = gateway.runtime.config.model_dump(by_alias=True)
    data["limits"]["maxBodyBytes"] = 10
    gateway.runtime.apply(GatewayConfig.model_validate(data))
    response, content = await gateway.post(json=chat())
    assert response.status == 413
    assert "larger than 10 bytes" in message_of(content)


async def test_hop_by_hop_headers_are_not_forwarded(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    headers = {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "Proxy-Connection": "keep-alive"}
    await gateway.post(json=chat(), headers={**headers, "X-Kept": "1"})
    sent = engine.requests[0][1]
    assert "x-kept" in sent
    assert not {"x-hop", "proxy-connection"} & sent.keys()


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_credentials_of_the_client_are_not_forwarded(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str
) -> None:
    credentials = {
        "Authorization": "Bearer sk-client",
        "x-api-key": "sk-client",
        "Cookie": "session=sk-client",
    }
    await gateway.post(path, json=chat(), headers=credentials)
    assert "sk-client" not in str(engine.requests[0])
    for pool in gateway.runtime.pools.values():
        pool.configure(256, "sk-engine")
    await gateway.post(path, json=chat(), headers=credentials)
    assert engine.requests[1][1]["authorization"] == "Bearer sk-engine"
    assert "sk-client" not in str(engine.requests[1])


class RecordingThreads(ThreadPoolExecutor):
    """The threads of an event loop, which record the names of the functions that they run."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The partial object of asyncio.to_thread, whose first argument is the function.
        self.functions.append(function.args[0].__name__)
        return super().submit(function, *args, **kwargs)


async def longest_pause(task: asyncio.Task[Any]) -> float:
    """The longest time in seconds for which the event loop was busy until the task ended."""
    longest, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


@pytest.fixture
async def threads() -> RecordingThreads:
    threads = RecordingThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        (CHAT, ["parse_object", "resolve_model", "_prompts", "count", "with_salt", "request_usage"]),
        ("/v1/embeddings", ["parse_object", "resolve_model"]),
    ],
)
async def test_long_request_is_prepared_in_threads(
    gateway: InProcessGateway, tmp_path: Path, threads: RecordingThreads, path: str, steps: list[str]
) -> None:
    """Most of the time for 200,000 messages, about a second, is available to other requests."""
    runtime = gateway.runtime
    (tmp_path / "keys").write_text("team:sk-alpha\n")
    runtime.keys = Keys.load(tmp_path / "keys")
    limits = runtime.config.limits.model_copy(update={"max_body_bytes": 10_000_000})
    runtime.config = runtime.config.model_copy(update={"limits": limits})
    messages = [{"role": "user", "content": "x"}] * 200_000
    body = chat(messages=messages, cache_salt="own", stream=True, stream_options={"include_usage": False})
    headers = {"Authorization": "Bearer sk-alpha", "Content-Type": "application/json"}
    data = io.BytesIO(json.dumps(body).encode())
    began = time.perf_counter()
    request = asyncio.create_task(gateway.post(path, data=data, headers=headers))
    pause = await longest_pause(request)
    seconds = time.perf_counter() - began
    assert (await request)[0].status == 200
    assert threads.functions == steps
    if path == CHAT:
        assert pause < 0.5 * seconds


async def test_short_request_is_prepared_without_threads(
    gateway: InProcessGateway, threads: RecordingThreads
) -> None:
    assert (await gateway.post(json=chat()))[0].status == 200
    assert threads.functions == []
