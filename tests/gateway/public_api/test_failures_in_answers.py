"""Engines that report a failure in an answer whose HTTP status is 200: before the first content, and after it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from dps_gateway.api.outcome import Failure, failure_of
from dps_testkit.engine_contract.exchange import Case, recorded
from dps_testkit.in_process_gateway import (
    CHAT,
    CHUNK,
    DONE,
    InProcessGateway,
    ScriptedEngine,
    chat,
    message_of,
    send_stream,
)

FULL = "The request queue is full."
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(),
    "/v1/completions": {"model": "m", "prompt": "hello"},
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
    RESPONSES: {"model": "m", "input": "hello", "store": False},
    "/generate": {"text": "hello"},
}


def event(document: dict[str, Any], name: str = "") -> bytes:
    """A stream event; `name` is its type in the APIs whose events have one."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def typed(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def response(status: str, **fields: Any) -> dict[str, Any]:
    return {"object": "response", "id": "resp_1", "status": status, **fields}


QUEUE_FULL = {
    "error": {"object": "error", "message": FULL, "type": "SERVICE_UNAVAILABLE", "param": None, "code": 503}
}
START = typed(
    "message_start", message={"role": "assistant", "usage": {"input_tokens": 9, "output_tokens": 0}}
)
CREATED = typed("response.created", response=response("in_progress", error=None))

FINISHED: dict[str, Sequence[bytes]] = {
    CHAT: (CHUNK, DONE),
    "/v1/completions": (event({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}), DONE),
    MESSAGES: (START, typed("content_block_delta", delta={"text": "a"}), typed("message_stop")),
    RESPONSES: (
        CREATED,
        typed("response.output_text.delta", delta="a"),
        typed("response.completed", response=response("completed")),
    ),
    "/generate": (event({"text": "a", "meta_info": {"finish_reason": {"type": "stop"}}}), DONE),
}
"""A stream of each API. The last event but one has content."""


PATHS = dict(zip(("chat", "completions", "messages", "responses", "generate"), BODIES, strict=True))
COMPLETE = "messages: aborted while it is running"
"""SGLang's answer is a complete one."""
REFUSED = [
    case
    for case in recorded()["refusals"]
    if "running, stream" not in case["name"] and case["name"] != COMPLETE
]
"""What SGLang answers if its queue is full, and if it aborts a request before the first content is sent."""


def event_of(shape: Any) -> bytes:
    return DONE if shape == "[DONE]" else event(shape, shape.get("event", ""))


def path_of(case: Case) -> str:
    return PATHS[case["name"].partition(":")[0]]


WHOLE = [case for case in REFUSED if "json" in case["answer"]]
AT_START: list[tuple[str, str, Sequence[bytes]]] = [
    (case["name"], path_of(case), list(map(event_of, case["answer"]["events"])))
    for case in REFUSED
    if "events" in case["answer"]
]
AT_START += [
    ("vLLM", CHAT, (event({"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]}), DONE)),
    ("spread over lines", CHAT, (b'data: {"error":\ndata: {"message": "busy", "code": 503}}\n\n', DONE)),
    ("CRLF", CHAT, (event(QUEUE_FULL).replace(b"\n", b"\r\n"), b"data:[DONE]\r\n\r\n")),
    ("error without an event before", RESPONSES, (CREATED, typed("error", message=FULL, code=503))),
]


def streams(engine: ScriptedEngine, *answers: Sequence[bytes]) -> None:
    """Answer one request after another with these streams, and all later ones with the last."""
    left = list(answers)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await send_stream(request, left.pop(0) if len(left) > 1 else left[0])

    engine.answer = answer


def failures(gateway: InProcessGateway) -> dict[str, float]:
    """Failed attempts by kind."""
    samples = (each for family in gateway.runtime.metrics.registry.collect() for each in family.samples)
    return {each.labels["kind"]: each.value for each in samples if each.name == "dps_upstream_failures_total"}


@pytest.mark.parametrize(("case", "path", "pieces"), AT_START, ids=[case for case, _, _ in AT_START])
async def test_stream_that_begins_with_a_failure_is_sent_to_another_engine(
    gateway: InProcessGateway, engine: ScriptedEngine, case: str, path: str, pieces: Sequence[bytes]
) -> None:
    streams(engine, pieces, FINISHED[path])
    answer, content = await gateway.post(path, json=BODIES[path] | {"stream": True})
    assert (answer.status, content) == (200, b"".join(FINISHED[path]))
    assert len(engine.requests) == 2
    assert sum(failures(gateway).values()) == 1


@pytest.mark.parametrize(("case", "path", "pieces"), AT_START, ids=[case for case, _, _ in AT_START])
async def test_client_is_told_and_the_turn_is_not_committed_if_every_engine_fails(
    gateway: InProcessGateway, engine: ScriptedEngine, case: str, path: str, pieces: Sequence[bytes]
) -> None:
    streams(engine, pieces)
    for _ in range(2):
        answer, content = await gateway.post(path, json=BODIES[path] | {"stream": True})
        assert (answer.status, answer.content_type) == (503, "application/json")
        assert json.loads(content)["error"]["message"]
        assert answer.headers["x-dps-history"] == "new"


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case["name"])
async def test_refused_or_aborted_answer_that_is_not_streamed_is_no_answer(
    gateway: InProcessGateway, engine: ScriptedEngine, case: Case
) -> None:
    path, shape = path_of(case), case["answer"]
    engine.respond(status=shape["status"], body=json.dumps(shape["json"]), content_type="application/json")
    answer, content = await gateway.post(path, json=BODIES[path])
    assert (answer.status, len(engine.requests)) == (503, 2)
    assert json.loads(content)["error"]["message"]
    assert failures(gateway) == {"status_503" if "full queue" in case["name"] else "aborted": 1}
    answer, _ = await gateway.post(path, json=BODIES[path])
    assert answer.headers["x-dps-history"] == "new"


async def test_client_error_in_a_stream_becomes_the_status_of_the_response(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    streams(engine, (event({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}), DONE))
    answer, content = await gateway.post(json=chat(stream=True))
    assert (answer.status, message_of(content), len(engine.requests)) == (400, "too long", 1)


async def test_aborted_stream_is_continued_by_another_engine(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    aborted = event({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
    streams(engine, (CHUNK, aborted, DONE), (CHUNK, DONE))
    answer, content = await gateway.post(json=chat(stream=True))
    assert (answer.status, content.count(b'"content":"a"'), content.endswith(DONE)) == (200, 2, True)
    assert b"abort" not in content
    assert [pool.in_flight for pool in gateway.runtime.pools.values()] == [0, 0]


@pytest.mark.parametrize("streamed_as_text", [True, False])
async def test_error_after_content_ends_the_stream_with_an_error(
    gateway: InProcessGateway, engine: ScriptedEngine, streamed_as_text: bool
) -> None:
    """Whether the gateway ends the stream, or the engine's own error event does."""
    failed = typed("response.failed", response=response("failed", error={"message": FULL}))
    content_of_responses = typed("response.output_text.delta", delta="a")
    path = CHAT if streamed_as_text else RESPONSES
    streams(
        engine, (CHUNK, event(QUEUE_FULL)) if streamed_as_text else (CREATED, content_of_responses, failed)
    )
    fields = {"stream": True, "n": 2} if streamed_as_text else {"stream": True}
    answer, content = await gateway.post(path, json=BODIES[path] | fields)
    assert (answer.status, len(engine.requests)) == (200, 1)
    assert content.endswith(event(QUEUE_FULL) if streamed_as_text else failed)
    assert failures(gateway) == {"aborted": 1}


@pytest.mark.parametrize(
    "document",
    [
        {"choices": [{"delta": {"content": '{"error": "abort"}'}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}], "error": None},
        {"type": "response.completed", "response": response("completed", error=None)},
        {"type": "message_start", "message": {"usage": {"output_tokens": 0}}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"text": "error", "meta_info": {"finish_reason": None}},
        ["error"],
        "error",
    ],
)
def test_events_without_a_failure(document: Any) -> None:
    assert failure_of(document) is None


def test_one_aborted_answer_of_a_batch_is_a_failure() -> None:
    finished, aborted = ({"meta_info": {"finish_reason": {"type": kind}}} for kind in ("stop", "abort"))
    assert failure_of([finished, aborted]) == Failure(None, "abort", True)


def test_error_without_a_status_is_one_of_the_engine() -> None:
    assert failure_of({"error": "out of memory"}) == Failure(500, "out of memory", True)
