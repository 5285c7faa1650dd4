"""The requests that the gateway answers itself, and those it relays for information about the model."""

import json

import aiohttp
import pytest
from aiohttp import web

from dps_gateway.api.passthrough import RELAYED_POST
from dps_gateway.api.relay import PART_BYTES
from dps_gateway.auth import Keys
from dps_gateway.upstream.admission import SlotRequest
from dps_gateway.upstream.replica import Configuration
from dps_testkit.in_process_gateway import (
    CHAT,
    InProcessGateway,
    ScriptedEngine,
    broken_off,
    chat,
    message_of,
)


async def test_health_needs_no_key_and_follows_readiness(gateway: InProcessGateway) -> None:
    gateway.runtime.keys = Keys()
    assert (await gateway.send("GET", "/health"))[0].status == 503
    for pool in gateway.runtime.pools.values():
        for replica in pool.replicas.values():
            pool.mark_available(replica)
    assert (await gateway.send("GET", "/health"))[0].status == 200


@pytest.mark.parametrize("path", ["/v1/loads", "/v1/a%2Fb", "/model_info", "/health_generate"])
async def test_information_about_the_model_and_its_health_comes_from_an_engine(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str
) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    response = await gateway.raw(head.encode())
    assert (response.split()[1], engine.requests[0][0]) == (b"200", path)


async def test_information_about_the_server_contains_no_secret(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    secrets = {
        "api_key": "sk-engine",
        "admin_api_key": "sk-admin",
        "launch_command": "sglang --api-key sk-engine",
    }
    state = {"avg_spec_accept_length": 3.1, "last_gen_throughput": 9.5}
    public = {"version": "0.5.23", "model_path": "m", "speculative_num_steps": 3}
    info = secrets | public | {"internal_states": [secrets | state]}
    engine.respond(text=json.dumps(info), content_type="application/json")
    response, content = await gateway.send("GET", "/server_info")
    assert response.status == 200
    assert json.loads(content) == public | {"internal_states": [state]}


async def refusing_head(request: web.Request) -> web.StreamResponse:
    """Answers GET requests with a long list of models. Refuses HEAD requests, as SGLang does."""
    if request.method != "GET":
        raise web.HTTPMethodNotAllowed(request.method, ["GET"])
    return web.json_response({"object": "list", "data": [{"id": "m", "root": "x" * PART_BYTES}]})


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/version", 200),
        ("/v1/models", 200),
        ("/v1/models/m", 200),
        ("/v1/models/unknown", 404),
        ("/v1/loads", 200),
        ("/model_info", 200),
        ("/server_info", 200),
    ],
)
async def test_head_request_is_answered_like_a_get_request_without_the_body(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str, status: int
) -> None:
    engine.answer = refusing_head
    for pool in gateway.runtime.pools.values():
        for replica in pool.replicas.values():  # the engine generates as many answers as it can
            pool.record_configuration(replica, Configuration(max_running=1))
            assert pool.take(SlotRequest([pool]))
    lines: dict[str, set[bytes]] = {}
    for method in ("GET", "HEAD"):
        request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nx-request-id: 1\r\nConnection: close\r\n\r\n"
        head, _, body = (await gateway.raw(request.encode())).partition(b"\r\n\r\n")
        lines[method] = {line for line in head.split(b"\r\n") if not line.startswith(b"Date:")}
        assert head.split()[1] == str(status).encode()
        assert bool(body) is (method == "GET")
    assert lines["GET"] - lines["HEAD"] <= {b"Transfer-Encoding: chunked"}
    assert lines["HEAD"] <= lines["GET"]


async def test_unreadable_information_about_the_server_is_not_relayed(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.respond(text="api_key=sk-engine")
    response, content = await gateway.send("GET", "/server_info")
    assert (response.status, b"sk-engine" in content) == (502, False)


async def test_relayed_answer_that_breaks_off_counts_as_a_failure_of_the_engine(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.answer = broken_off
    with pytest.raises(aiohttp.ClientPayloadError):
        await gateway.post("/v1/embeddings", json={"input": "hello"})
    assert (gateway.requests(502), gateway.requests(499)) == (1, 0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/tokenize", *RELAYED_POST])
async def test_inference_without_generation_is_relayed(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str
) -> None:
    response, _ = await gateway.post(path, json={"model": "m", "prompt": "hello"})
    assert (response.status, response.headers["x-dps-history"]) == (200, "stateless")
    assert (engine.requests[0][0], json.loads(engine.requests[0][2])) == (
        path,
        {"model": "m", "prompt": "hello"},
    )


@pytest.mark.parametrize(
    "path",
    [
        "/flush_cache",
        "/load_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload%5Flora_adapter",
        "/abort_request",
        "/api/chat",
        "/invocations",
    ],
)
async def test_other_endpoints_of_engines_are_not_reachable(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str
) -> None:
    assert (await gateway.post(path, json={}))[0].status == 404
    assert engine.requests == []


async def test_unknown_path_is_a_json_404(gateway: InProcessGateway) -> None:
    response, content = await gateway.send("GET", "/nothing")
    assert (response.status, message_of(content)) == (404, "there is no endpoint /nothing")


async def test_wrong_method_is_a_json_405(gateway: InProcessGateway) -> None:
    response, content = await gateway.send("GET", "/generate")
    assert (response.status, message_of(content)) == (405, "/generate does not support GET")
    assert "POST" in response.headers["Allow"]


async def test_preflight_request_needs_no_key(gateway: InProcessGateway) -> None:
    gateway.runtime.keys = Keys()
    headers = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response, _ = await gateway.send("OPTIONS", CHAT, headers=headers)
    assert response.status == 204
    assert response.headers["Access-Control-Allow-Origin"] == "*"
    assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    refused, _ = await gateway.post(json=chat(), headers={"Origin": "https://app.example"})
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, "*")
