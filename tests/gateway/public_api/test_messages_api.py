"""Anthropic's Messages API."""

import json
from typing import Any

import pytest

from dps_gateway.auth import Key, Keys, digest_of
from dps_testkit.in_process_gateway import CHAT, InProcessGateway, ScriptedEngine, chat

MESSAGES = "/v1/messages"
STARTED = b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg","usage":{"input_tokens":9}}}\n\n'


def message(**fields: Any) -> dict[str, Any]:
    """The body of a request to /v1/messages."""
    return chat(max_tokens=8, **fields)


async def test_header_that_differs_in_every_request_is_neither_counted_nor_forwarded(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    def request(cch: str, *messages: dict[str, str]) -> dict[str, Any]:
        header = [f"x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch={cch};"]
        texts = [*(header if cch else []), "You are an agent."]
        system = [{"type": "text", "text": text} for text in texts]
        return message(system=system, messages=list(messages))

    first = [{"role": "user", "content": "hi"}]
    then = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    turns = [("a1b2c", first), ("d3e4f", then), ("", then)]
    responses = [(await gateway.post(MESSAGES, json=request(cch, *messages)))[0] for cch, messages in turns]
    assert [response.headers["x-dps-history"] for response in responses] == ["new", "grown", "grown"]
    assert responses[1].headers["x-dps-prompt-tokens"] == responses[2].headers["x-dps-prompt-tokens"]
    sent = [json.loads(body) for _, _, body in engine.requests]
    assert [each["system"] for each in sent] == [[{"type": "text", "text": "You are an agent."}]] * 3
    assert gateway.runtime.metrics.registry.get_sample_value("dps_volatile_prompt_parts_total") == 2


async def test_stream_that_ends_early_ends_with_an_anthropic_error_event(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.stream(STARTED)
    _, content = await gateway.post(MESSAGES, json=message(stream=True))
    event, _, data = content.removeprefix(STARTED).partition(b"\ndata: ")
    assert event == b"event: error"
    assert json.loads(data) == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine ended the stream without message_stop"},
    }


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (
            400,
            '{"type":"error","error":{"type":"t","message":"as is"}}',
            {"type": "t", "message": "as is"},
        ),
        (401, '{"error":"Unauthorized"}', {"type": "authentication_error", "message": "Unauthorized"}),
        (404, '{"detail":"Not Found"}', {"type": "not_found_error", "message": "Not Found"}),
        (500, "plain text", {"type": "api_error", "message": "plain text"}),
        (503, "loading", {"type": "overloaded_error", "message": "loading"}),
    ],
)
async def test_error_of_the_engine_becomes_an_anthropic_error_object(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str, status: int, body: str, error: Any
) -> None:
    engine.respond(status=status, text=body)
    response, content = await gateway.post(path, json=message())
    assert response.status == status
    assert json.loads(content) == {"type": "error", "error": error}


async def test_credential_in_x_api_key_is_accepted_and_not_forwarded(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk-ant"))])
    sent = {"x-api-key": "sk-ant", "anthropic-version": "2023-06-01"}
    response, _ = await gateway.post(MESSAGES, json=message(), headers=sent)
    refused, content = await gateway.post(MESSAGES, json=message(), headers={"x-api-key": "no"})
    ((path, received, body),) = engine.requests
    assert (response.status, path, json.loads(body)) == (200, MESSAGES, message())
    assert (received.get("x-api-key"), received["anthropic-version"]) == (None, "2023-06-01")
    assert (refused.status, json.loads(content)["error"]["type"]) == (401, "authentication_error")


async def test_query_does_not_prevent_routing(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    response, _ = await gateway.post(f"{MESSAGES}?beta=true", json=message())
    assert response.headers["x-dps-history"] == "new"
    assert [path for path, _, _ in engine.requests] == [MESSAGES]


async def test_chat_and_messages_with_the_same_prompt_share_a_session(gateway: InProcessGateway) -> None:
    first, _ = await gateway.post(CHAT, json=chat())
    grown = [*chat()["messages"], {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    second, _ = await gateway.post(MESSAGES, json=message() | {"messages": grown})
    assert second.headers["x-dps-session"] == first.headers["x-dps-session"]
    assert second.headers["x-dps-history"] == "grown"
