"""Requests that are malformed, or that a gateway and an engine could understand differently."""

import json
from typing import Any

import pytest

from dps_gateway.api.body import MAX_VALUES, Body
from dps_gateway.api.errors import BadRequest
from dps_testkit.in_process_gateway import (
    CHAT,
    CHUNK,
    DONE,
    InProcessGateway,
    ScriptedEngine,
    chat,
    message_of,
)
from tests.gateway.servers import configure


async def test_credentials_in_a_malformed_request_do_not_appear_in_logs(
    gateway: InProcessGateway, caplog: pytest.LogCaptureFixture
) -> None:
    response = await gateway.raw(b"GET /v1/loads HTTP/1.1\r\nAuthorization: Bearer sk-secret\x01\r\n\r\n")
    assert response.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert "malformed request" in caplog.text
    assert "sk-secret" not in caplog.text


async def test_absolute_target_is_forwarded_as_a_path(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    target = f"http://127.0.0.1:{gateway.port}/v1/loads?a=1"
    response = await gateway.raw(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert response.startswith(b"HTTP/1.1 200 ")
    assert engine.requests[0][0] == "/v1/loads?a=1"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models", "/unknown"])
async def test_header_over_the_limit_is_refused_with_the_limit(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str
) -> None:
    configure(gateway.runtime, "listen", max_header_bytes=1024)
    headers = {"x-metadata": "m" * 1025, "x-request-id": "mine"}
    response, content = await gateway.post(path, json=chat(), headers=headers)
    assert (response.status, response.headers["x-request-id"]) == (431, "mine")
    message = "the header x-metadata has 1025 bytes, more than the 1024 of listen.maxHeaderBytes"
    answer = json.loads(content)
    assert (answer["error"]["message"], engine.requests) == (message, [])
    assert ("type" in answer) == (path == "/v1/messages")


@pytest.mark.parametrize("header", ["x-session-id", "x-request-id", "x-other"])
async def test_header_that_is_not_utf8_is_ignored(
    gateway: InProcessGateway, engine: ScriptedEngine, header: str
) -> None:
    body = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    response = await gateway.raw(head.encode() + f"{header}: zo".encode() + b"\xe9\r\n\r\n" + body)
    assert response.startswith(b"HTTP/1.1 200 ")
    assert "zo" not in engine.requests[0][1].get(header, "")


async def test_deeply_nested_request_reaches_the_engine(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    nested = "[" * 400 + "]" * 400
    body = json.dumps(chat(stream=True, stream_options={})).replace("{}", '{"x": ' + nested + "}")
    engine.stream(CHUNK, DONE)
    response, content = await gateway.post(data=body.encode())
    assert (response.status, content) == (200, CHUNK + DONE)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../flush_cache",
        "/v1/%2e%2e/flush_cache",
        "/v1/..%2fflush_cache",
        "/v1/..%5cflush_cache",
        "/v1//flush_cache",
        "/v1/x/..",
        "/v1/..;/flush_cache",
        "/v1/.%3Bx/flush_cache",
        "/v1/chat%2Fcompletions",
        "/v1/chat/completion%73",
    ],
)
async def test_path_that_an_engine_may_resolve_differently_is_refused(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    response = await gateway.raw(head.encode())
    assert response.split()[1] in (b"400", b"404")
    assert engine.requests == []


def nested(levels: int) -> Any:
    """A number in a list in a list, and so on."""
    return [nested(levels - 1)] if levels else 1


EMPTY, DEEP = "a prompt is empty", "prompts are nested too deeply"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"input_ids": []}, EMPTY),
    ("/v1/completions", {"prompt": [[""]]}, EMPTY),
    ("/v1/completions", {"prompt": ["x", []]}, EMPTY),
    ("/generate", {"text": ""}, EMPTY),
    ("/generate", {"input_ids": [[]]}, EMPTY),
    *((CHAT, {"input_ids": nested(levels)}, DEEP) for levels in (3, 600)),
    *(("/v1/completions", {"prompt": nested(levels)}, DEEP) for levels in (3, 600)),
    *(("/generate", {field: nested(levels)}, DEEP) for field in ("text", "input_ids") for levels in (3, 600)),
    *(
        (path, {"prompt": "x", "stream": True, "stream_options": "bad"}, "stream_options must be an object")
        for path in (CHAT, "/v1/completions")
    ),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
async def test_prompts_and_options_of_another_form_are_refused(
    gateway: InProcessGateway,
    engine: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    message: str,
) -> None:
    if path == CHAT:
        body = chat() | body
    response, content = await gateway.post(path, json=body)
    assert (response.status, engine.requests) == (400, [])
    assert message_of(content).startswith(message)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_body_with_too_many_values_is_refused() -> None:
    body = b'{"messages": [' + b",".join([b"{}"] * MAX_VALUES) + b"]}"
    with pytest.raises(BadRequest, match=f"^the body has more than {MAX_VALUES} values$"):
        Body.parse(body)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_unknown_expectation_is_refused_without_being_quoted(
    gateway: InProcessGateway, path: str
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\nExpect: sk-secret\r\n\r\n"
    response = await gateway.raw(head.encode())
    assert response.startswith(b"HTTP/1.1 417 ")
    assert b"sk-secret" not in response
    error = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"] == "the gateway supports only 'Expect: 100-continue'"


async def test_websocket_is_refused_so_that_the_client_falls_back_to_http(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    response, content = await gateway.send("GET", "/v1/responses", headers=headers)
    assert (response.status, response.headers["Upgrade"]) == (426, "HTTP/1.1")
    assert message_of(content) == "the gateway serves no WebSockets; send the request over HTTP"
    assert engine.requests == []
