"""What of a request reaches the engine, and the limit of its size."""

import asyncio
import gzip
import json
import threading
from typing import Any

import pytest

from dps_gateway.api.job import LONG_BODY_BYTES
from dps_gateway.config import GatewayConfig
from dps_gateway.prompt.accounting import Prompt
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


async def test_event_loop_runs_while_a_long_chat_is_rendered(
    gateway: InProcessGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering 200,000 messages takes half a second, in which other requests must be served."""
    begun, other_served = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    render = gateway.runtime.accountant.chat

    def slow(body: dict[str, Any]) -> Prompt:
        loop.call_soon_threadsafe(begun.set)
        assert other_served.wait(10), "no other request was served meanwhile"
        return render(body)

    monkeypatch.setattr(gateway.runtime.accountant, "chat", slow)
    limits = gateway.runtime.config.limits.model_copy(update={"max_body_bytes": 2 * LONG_BODY_BYTES})
    gateway.runtime.config = gateway.runtime.config.model_copy(update={"limits": limits})
    long = asyncio.create_task(gateway.post(json=chat(user="x" * LONG_BODY_BYTES)))
    await asyncio.wait_for(begun.wait(), 60)
    await gateway.send("GET", "/version")
    other_served.set()
    assert (await long)[0].status == 200
