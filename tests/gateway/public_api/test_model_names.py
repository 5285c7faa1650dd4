"""Model names in requests: aliases, adapters and unknown names."""

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from dps_gateway.auth import Key, Keys, digest_of
from dps_gateway.pool import Pool
from dps_testkit.in_process_gateway import CHAT, InProcessGateway, ScriptedEngine, chat, message_of
from tests.gateway.servers import configure


@pytest.fixture(autouse=True)
def model(gateway: InProcessGateway) -> None:
    configure(gateway.runtime, "model", aliases={"gpt": "m", "tuned": "m:lora", "gpt:7b": "m"})


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize(
    ("asked", "forwarded"),
    [
        ({"model": "m"}, {"model": "m"}),
        ({"model": "m:lora"}, {"model": "m:lora"}),
        ({"model": "default"}, {"model": "m"}),
        ({"model": "default:lora"}, {"model": "m:lora"}),
        ({"model": "gpt"}, {"model": "m"}),
        ({"model": "gpt:lora"}, {"model": "m:lora"}),
        ({"model": "gpt:7b"}, {"model": "m"}),
        ({"model": "tuned"}, {"model": "m:lora"}),
        ({"model": ""}, {"model": ""}),
        ({}, {}),
    ],
)
async def test_alias_is_replaced(
    gateway: InProcessGateway,
    engine: ScriptedEngine,
    path: str,
    asked: dict[str, str],
    forwarded: dict[str, str],
) -> None:
    rest = {"messages": [{"role": "user", "content": "hello"}]}
    assert (await gateway.post(path, json=rest | asked))[0].status == 200
    assert json.loads(engine.requests[0][2]) == rest | forwarded


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("asked", ["other", "mm", "other:lora", ["m"], 1])
async def test_unknown_model_is_not_found(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str, asked: Any
) -> None:
    response, content = await gateway.post(path, json=chat(model=asked))
    assert (response.status, json.loads(content)["error"]["code"]) == (404, "model_not_found")
    served = "m, gpt, gpt:7b, tuned"
    assert message_of(content) == f"the model '{asked}' is not served; the served models are {served}"
    assert engine.requests == []


async def test_unknown_model_is_forwarded_if_the_engines_decide(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    configure(gateway.runtime, "model", strict=False)
    assert (await gateway.post(json=chat(model="other")))[0].status == 200
    assert json.loads(engine.requests[0][2])["model"] == "other"


async def test_body_that_is_not_json_is_relayed(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    audio = {"Content-Type": "audio/wav"}
    response, _ = await gateway.post("/v1/audio/transcriptions", data=b"RIFF", headers=audio)
    assert (response.status, engine.requests[0][2]) == (200, b"RIFF")


async def test_alias_and_model_are_one_session(gateway: InProcessGateway) -> None:
    for model, history in (("gpt", "new"), ("m", "grown")):
        response, _ = await gateway.post(json=chat(model=model), headers={"x-session-id": "s"})
        assert response.headers["x-dps-history"] == history


ADAPTER = {"id": "lora", "object": "model", "owned_by": "sglang", "root": "/lora", "parent": "m"}
SGLANG: dict[str, Any] = {
    "object": "list",
    "data": [{"id": "m", "object": "model", "owned_by": "sglang", "root": "m", "parent": None}, ADAPTER],
}
VLLM = {
    "object": "list",
    "data": [
        {"id": "m", "object": "model", "owned_by": "vllm", "parent": None},
        {"id": "lora", "object": "model", "owned_by": "vllm", "parent": "m"},
    ],
}


async def listed(gateway: InProcessGateway, **options: Any) -> list[str]:
    response, content = await gateway.send("GET", "/v1/models", **options)
    assert (response.status, response.content_type) == (200, "application/json")
    return [model["id"] for model in json.loads(content)["data"]]


async def test_every_listed_model_can_be_requested_and_retrieved(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.respond(text=json.dumps(SGLANG), content_type="application/json")
    names = await listed(gateway)
    assert names == ["m", "m:lora", "gpt", "tuned", "gpt:7b"]
    for name in names:
        response, content = await gateway.send("GET", f"/v1/models/{quote(name, safe='')}")
        assert (response.status, json.loads(content)["id"]) == (200, name)
        assert engine.requests[-1][0] == "/v1/models"
        assert (await gateway.post(json=chat(model=name)))[0].status == 200
        assert json.loads(engine.requests[-1][2])["model"] in ("m", "m:lora")


WITHOUT_ADAPTER = {"object": "list", "data": SGLANG["data"][:1]}


@pytest.mark.parametrize("lists", [(SGLANG, WITHOUT_ADAPTER), (WITHOUT_ADAPTER, SGLANG)])
async def test_adapter_that_only_one_pool_has_loaded_is_not_listed(
    gateway: InProcessGateway, engine: ScriptedEngine, lists: tuple[dict[str, Any], ...]
) -> None:
    waiting: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(waiting.pop(0))

    engine.answer = answer
    waiting[:] = lists
    assert await listed(gateway) == ["m", "gpt", "gpt:7b"]
    waiting[:] = lists
    assert (await gateway.send("GET", "/v1/models/m:lora"))[0].status == 404
    assert waiting == []


async def test_models_of_one_pool_are_listed_if_the_other_does_not_answer(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    answers = [web.json_response(SGLANG), web.json_response({}, status=500)]

    async def answer(request: web.Request) -> web.StreamResponse:
        return answers.pop(0)

    engine.answer = answer
    assert "m:lora" in await listed(gateway)
    assert answers == []
    answers.append(web.json_response(SGLANG))
    pool = gateway.runtime.pools[Pool.SPECULATIVE]
    pool.mark_unavailable(next(iter(pool.replicas.values())))
    assert "m:lora" in await listed(gateway)


async def test_models_of_one_pool_are_listed_if_the_other_does_not_answer_in_the_time_of_the_client(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(2.0 if len(engine.requests) > 1 else 0)
        return web.json_response(SGLANG)

    engine.answer = answer
    assert "m:lora" in await listed(gateway, headers={"x-envoy-upstream-rq-timeout-ms": "500"})


@pytest.mark.parametrize("strict", [True, False])
async def test_adapters_of_vllm_are_listed_by_their_own_names_if_requests_may_use_them(
    gateway: InProcessGateway, engine: ScriptedEngine, strict: bool
) -> None:
    configure(gateway.runtime, "model", strict=strict)
    engine.respond(text=json.dumps(VLLM), content_type="application/json")
    assert await listed(gateway) == (["m", "gpt", "gpt:7b"] if strict else ["m", "lora", "gpt", "gpt:7b"])
    assert (await gateway.send("GET", "/v1/models/lora"))[0].status == (404 if strict else 200)


async def test_model_is_listed_by_its_configured_name(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    cards = [{"id": "/models/m", "object": "model", "owned_by": "sglang"}]
    engine.respond(text=json.dumps({"object": "list", "data": cards}), content_type="application/json")
    assert await listed(gateway) == ["m", "gpt", "gpt:7b"]


@pytest.mark.parametrize("name", ["other", "lora", "m:other", "org%2Fm"])
async def test_model_that_cannot_be_requested_cannot_be_retrieved(
    gateway: InProcessGateway, engine: ScriptedEngine, name: str
) -> None:
    engine.respond(text=json.dumps(SGLANG), content_type="application/json")
    response, content = await gateway.send("GET", f"/v1/models/{name}")
    assert (response.status, json.loads(content)["error"]["code"]) == (404, "model_not_found")
    assert "the served models are m, " in message_of(content)


async def test_key_lists_and_retrieves_only_the_models_that_it_may_use(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.respond(text=json.dumps(SGLANG), content_type="application/json")
    gateway.runtime.keys = Keys([Key("t", digest_of("sk"), models=frozenset({"m"}))])
    key = {"Authorization": "Bearer sk"}
    assert await listed(gateway, headers=key) == ["m", "gpt", "gpt:7b"]
    for name, status in {"m": 200, "gpt": 200, "m:lora": 403, "tuned": 403}.items():
        assert (await gateway.send("GET", f"/v1/models/{name}", headers=key))[0].status == status


@pytest.mark.parametrize("text", ["<html>", "[]", '{"data": [1]}', '{"data": [{"id": 1}]}', "{}"])
async def test_unreadable_list_of_models_is_not_relayed(
    gateway: InProcessGateway, engine: ScriptedEngine, text: str
) -> None:
    engine.respond(text=text, content_type="application/json")
    for path in ("/v1/models", "/v1/models/m"):
        assert (await gateway.send("GET", path))[0].status == 502
