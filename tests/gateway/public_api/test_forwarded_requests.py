"""What of a request reaches the engine, and the limit of its size."""

import gzip
import json
import zlib
from collections.abc import Callable

import brotli
import pytest
from backports import zstd

from dps_testkit.in_process_gateway import CHAT, InProcessGateway, ScriptedEngine, chat, message_of
from tests.gateway.servers import configure

ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstd.compress,
}


@pytest.mark.parametrize("encoding", ENCODERS)
async def test_compressed_body_is_forwarded_without_its_encoding(
    gateway: InProcessGateway, engine: ScriptedEngine, encoding: str
) -> None:
    body = json.dumps(chat()).encode()
    headers = {"Content-Encoding": encoding}
    response, _ = await gateway.post(data=ENCODERS[encoding](body), headers=headers)
    assert response.status == 200
    assert "content-encoding" not in engine.requests[0][1]
    assert engine.requests[0][2] == body


@pytest.mark.parametrize("encoding", ENCODERS)
async def test_decompressed_body_counts_against_the_limit(gateway: InProcessGateway, encoding: str) -> None:
    body = ENCODERS[encoding](b"x" * 200_000)
    response, _ = await gateway.post(data=body, headers={"Content-Encoding": encoding})
    assert response.status == 413


@pytest.mark.parametrize("encoding", ENCODERS)
async def test_truncated_body_is_refused(
    gateway: InProcessGateway, engine: ScriptedEngine, encoding: str
) -> None:
    body = ENCODERS[encoding](json.dumps(chat(user="x" * 99)).encode())[:-20]
    response, _ = await gateway.post(data=body, headers={"Content-Encoding": encoding})
    assert (response.status, engine.requests) == (400, [])


async def test_body_with_an_unknown_encoding_is_refused(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    response, content = await gateway.post(data=b"{}", headers={"Content-Encoding": "compress"})
    assert (response.status, engine.requests) == (415, [])
    assert message_of(content) == "Content-Encoding must be one of br, deflate, gzip, zstd"


async def test_body_size_limit_can_be_reloaded(gateway: InProcessGateway) -> None:
    configure(gateway.runtime, "limits", max_body_bytes=10)
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
