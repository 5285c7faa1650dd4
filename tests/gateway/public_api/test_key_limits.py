"""API keys that are limited to some models, or in the number of requests."""

import asyncio
import json

import pytest
from aiohttp import web

from dps_gateway.auth import Key, Keys, digest_of
from dps_testkit.in_process_gateway import CHAT, USAGE, InProcessGateway, ScriptedEngine, chat, complete


async def test_key_may_use_only_its_models(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), models=frozenset({"m"}))])
    headers = {"Authorization": "Bearer sk"}
    assert (await gateway.post(json=chat(), headers=headers))[0].status == 200
    for path in (CHAT, "/v1/embeddings"):
        response, content = await gateway.post(path, json=chat(model="m:other"), headers=headers)
        assert (response.status, json.loads(content)["error"]["code"]) == (403, "model_not_allowed")
    assert len(engine.requests) == 1


async def test_requests_in_flight_of_a_key_are_limited(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), max_in_flight=1)])
    received, release = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        received.set()
        await release.wait()
        return await complete(request)

    engine.answer = slow
    headers = {"Authorization": "Bearer sk"}
    first = asyncio.create_task(gateway.post(json=chat(), headers=headers))
    await received.wait()
    response, content = await gateway.post(json=chat(), headers=headers)
    assert (response.status, json.loads(content)["error"]["code"]) == (429, "too_many_in_flight")
    assert response.headers["Retry-After"] == "1"
    release.set()
    assert (await first)[0].status == 200
    assert (await gateway.post(json=chat(), headers=headers))[0].status == 200


async def test_requests_of_a_key_per_minute_are_limited(gateway: InProcessGateway) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), requests_per_minute=2)])
    headers = {"Authorization": "Bearer sk"}
    for path in (CHAT, "/v1/embeddings"):
        assert (await gateway.post(path, json=chat(), headers=headers))[0].status == 200
    for path in (CHAT, "/v1/embeddings"):
        response, content = await gateway.post(path, json=chat(), headers=headers)
        assert (response.status, json.loads(content)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(response.headers["Retry-After"]) <= 90


@pytest.mark.parametrize("usage", [USAGE, None], ids=["reported", "not reported"])
async def test_tokens_of_a_key_per_minute_are_limited(
    gateway: InProcessGateway, engine: ScriptedEngine, usage: dict[str, int] | None
) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), tokens_per_minute=1)])
    engine.respond(body=json.dumps({"choices": [], "usage": usage}), content_type="application/json")
    headers = {"Authorization": "Bearer sk"}
    assert (await gateway.post(json=chat(), headers=headers))[0].status == 200
    response, content = await gateway.post(json=chat(), headers=headers)
    assert (response.status, json.loads(content)["error"]["code"]) == (429, "rate_limit_exceeded")
