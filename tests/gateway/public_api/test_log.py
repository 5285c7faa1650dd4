"""The gateway's own log, at its most detailed level."""

import json
import logging
from typing import Any

import pytest

from dps_gateway.upstream.exchange import LOG_SECONDS, LimitedLog
from dps_testkit.clock import ManualClock
from dps_testkit.in_process_gateway import CHAT, CHUNK, InProcessGateway, ScriptedEngine, chat

SECRET = "a secret"
MESSAGES, RESPONSES, COMPLETIONS = "/v1/messages", "/v1/responses", "/v1/completions"


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """The log of the gateway. The access log of aiohttp's server is that of the engine."""
    records = [each for each in caplog.records if each.name != "aiohttp.access"]
    return "\n".join(caplog.handler.format(each) for each in records)


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, user(SECRET), id="chat"),
        pytest.param(CHAT, user([{"type": SECRET}]), id="unknown kind of content"),
        pytest.param(CHAT, user({SECRET: SECRET}), id="content of another type"),
        pytest.param(CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}, id="unknown role"),
        pytest.param(CHAT, {"messages": SECRET}, id="messages of another type"),
        pytest.param(CHAT, user("x", tool_calls=[{"function": {"arguments": SECRET}}]), id="tool call"),
        pytest.param(CHAT, {**user("x"), "tools": [{"type": SECRET, "function": SECRET}]}, id="tool"),
        pytest.param(CHAT, {**user("x"), "chat_template_kwargs": SECRET}, id="template arguments"),
        pytest.param(CHAT, user(f"{SECRET} \ud800"), id="invalid Unicode"),
        pytest.param(CHAT, {**user(SECRET), "model": SECRET}, id="model"),
        pytest.param(CHAT, {**user(SECRET), "prompt_cache_key": SECRET, "cache_salt": SECRET}, id="ids"),
        pytest.param(COMPLETIONS, {"prompt": {SECRET: SECRET}}, id="prompt of another type"),
        pytest.param(COMPLETIONS, {"prompt": [1, SECRET]}, id="token ids of another type"),
        pytest.param(MESSAGES, {"messages": [{"role": SECRET, "content": SECRET}]}, id="Messages: role"),
        pytest.param(MESSAGES, user([{"type": SECRET}]), id="Messages: content"),
        pytest.param(MESSAGES, {**user(SECRET), "system": {SECRET: 1}}, id="Messages: system prompt"),
        pytest.param(RESPONSES, {"input": [{"type": SECRET}]}, id="Responses: item"),
        pytest.param(RESPONSES, {"input": {SECRET: 1}}, id="Responses: input"),
        pytest.param(RESPONSES, {"input": SECRET, "previous_response_id": SECRET}, id="Responses: id"),
        pytest.param("/v1/embeddings", {"input": SECRET}, id="relayed"),
        pytest.param("/v1/embeddings?x=" + SECRET, {"input": SECRET}, id="query"),
    ],
)
async def test_log_contains_neither_prompts_nor_answers_nor_credentials(
    gateway: InProcessGateway,
    engine: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"Authorization": f"Bearer {SECRET}", "x-session-id": SECRET, "Cookie": SECRET}
    data = json.dumps(body)
    answer = json.dumps({"text": SECRET, "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    answers = [(200, answer), (400, json.dumps({"error": {"message": SECRET}})), (500, SECRET), (503, SECRET)]
    for status, text in answers:
        engine.respond(status=status, text=text)
        await gateway.post(path, data=data, headers=headers)
    engine.stream(CHUNK.replace(b'"a"', b'"%s"' % SECRET.encode()), SECRET.encode(), abort=True)
    await gateway.post(path, data=json.dumps({**body, "stream": True}), headers=headers)
    await gateway.post(path, data=data[:-1], headers=headers)
    assert SECRET not in logged(caplog)


async def test_traceback_of_a_bug_contains_no_prompt(
    gateway: InProcessGateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(gateway.runtime.turns, "measure", fail)
    response, content = await gateway.post(json=chat(user=SECRET))
    assert response.status == 500
    assert b"a bug" not in content
    assert "a bug" in logged(caplog)
    assert SECRET not in logged(caplog)


def test_limited_errors_are_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = LimitedLog(clock)
    for number in range(3):
        log.error("error %d", number)
        clock.now += LOG_SECONDS / 2
    assert caplog.messages == ["error 0", "error 2"]
