"""Streams that another engine continues: what the client, its API key, the access log and the policy learn of it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dps_gateway.api.call import TIMEOUT_HEADER
from dps_gateway.auth import Key, Keys, digest_of
from dps_gateway.telemetry.json_log import JsonLog
from dps_testkit.in_process_gateway import (
    CHAT,
    DONE,
    USAGE,
    InProcessGateway,
    ScriptedEngine,
    chat,
    send_stream,
)
from tests.gateway.servers import configure, until

SAMPLED = chat(stream=True, temperature=1, max_tokens=20, stop=["x"])


def chunk(text: str, name: str = "first", **fields: Any) -> bytes:
    delta = {"content": text, **fields}
    document = {"id": name, "created": len(name), "choices": [{"index": 0, "delta": delta}]}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def finish(name: str = "second") -> bytes:
    document = {"id": name, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


BROKEN = [chunk("a", role="assistant"), chunk("b"), b'data: {"id":']
"""The last event is incomplete."""
OTHER = [chunk("", "second", role="assistant"), chunk("c", "second"), finish()]
REPORTED = USAGE | {"total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 99}}
WITH_USAGE = [
    b"data: " + json.dumps({"id": "second", "choices": [], "usage": REPORTED}).encode() + b"\n\n",
    DONE,
]
SHOWN_USAGE = {"stream_options": {"include_usage": True}}


def usage_in(content: bytes) -> dict[str, Any]:
    """The usage in the last event but `[DONE]`."""
    usage: dict[str, Any] = json.loads(content.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
    return usage


def answers(engine: ScriptedEngine, *streams: Sequence[bytes], status: int = 200) -> None:
    """Break the connection after the first stream, and answer the next requests with the others.

    `status` is that of the later answers.
    """
    left = list(streams)

    async def answer(request: web.Request) -> web.StreamResponse:
        pieces = left.pop(0)
        breaks = len(left) == len(streams) - 1
        return await send_stream(request, pieces, status=200 if breaks else status, abort=breaks)

    engine.answer = answer


def outcomes(gateway: InProcessGateway) -> dict[str, float]:
    samples = (each for family in gateway.runtime.metrics.registry.collect() for each in family.samples)
    return {
        each.labels["outcome"]: each.value
        for each in samples
        if each.name == "dps_stream_continuations_total"
    }


async def test_client_receives_one_stream(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    comment = b": comment\n\n"
    answers(engine, BROKEN, [*OTHER[:2], comment, *OTHER[2:], *WITH_USAGE])
    response, content = await gateway.post(json=SAMPLED | SHOWN_USAGE)
    texts = chunk("a", role="assistant") + chunk("b") + chunk("c")
    *_, last, _, _ = content.split(b"\n\n")
    assert content == texts + comment + finish("first") + last + b"\n\n" + DONE
    assert json.loads(last.removeprefix(b"data: "))["id"] == "first"
    tokens = await gateway.runtime.renderer.answer_tokens("ab")
    prompt, output = int(response.headers["x-dps-prompt-tokens"]), tokens + USAGE["completion_tokens"]
    assert usage_in(content) == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": REPORTED["total_tokens"],  # the same sum for both requests
        "prompt_tokens_details": {"cached_tokens": prompt},
    }
    assert outcomes(gateway) == {"continued": 1}
    assert [pool.in_flight for pool in gateway.runtime.pools.values()] == [0, 0]
    first, second = [json.loads(body) for _, _, body in engine.requests]
    begun = {"role": "assistant", "content": "ab"}
    assert second == first | {
        "messages": [*first["messages"], begun],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 20 - tokens,
    }


async def test_request_is_sent_again_if_no_text_has_been_received(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    begin = chunk("", role="assistant")
    answers(engine, [begin], [*OTHER, *WITH_USAGE])
    _, content = await gateway.post(json=SAMPLED | SHOWN_USAGE)
    assert content == b"".join([*OTHER, *WITH_USAGE])
    first, second = [json.loads(body) for _, _, body in engine.requests]
    assert first == second


@pytest.mark.parametrize("shown", [False, True])
async def test_finished_answer_is_closed_without_another_engine(
    gateway: InProcessGateway, engine: ScriptedEngine, shown: bool
) -> None:
    answers(engine, [chunk("a"), finish("first")])
    response, content = await gateway.post(json=SAMPLED | (SHOWN_USAGE if shown else {}))
    assert content.startswith(chunk("a") + finish("first"))
    assert content.endswith(DONE)
    assert (len(engine.requests), outcomes(gateway)) == (1, {"completed": 1})
    if shown:
        prompt = int(response.headers["x-dps-prompt-tokens"])
        assert usage_in(content) == {
            "prompt_tokens": prompt,
            "completion_tokens": 1,
            "total_tokens": prompt + 1,
        }
    else:
        assert content == chunk("a") + finish("first") + DONE


async def test_streams_are_not_continued_if_this_is_switched_off(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    configure(gateway.runtime, "retries", continue_streams=False)
    answers(engine, BROKEN)
    _, content = await gateway.post(json=SAMPLED)
    assert b"upstream_broken" in content
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("other", "status"),
    [([], 200), ([chunk("c", "second")], 200), ([b"no"], 500)],
    ids=["an empty stream", "an incomplete stream", "an error"],
)
async def test_stream_ends_with_an_error_event_if_the_other_engine_fails(
    gateway: InProcessGateway, engine: ScriptedEngine, other: list[bytes], status: int
) -> None:
    answers(engine, BROKEN, other, status=status)
    _, content = await gateway.post(json=SAMPLED)
    *chunks, error, _ = content.split(b"\n\n")
    begun = chunk("a", role="assistant") + chunk("b")
    assert b"\n\n".join([*chunks, b""]) == begun + (chunk("c") if len(other) == 1 and status == 200 else b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_broken"
    assert outcomes(gateway) == {"failed": 1}


async def test_stream_is_not_continued_after_the_time_that_the_client_allows(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    async def stalled(request: web.Request) -> web.StreamResponse:
        response = await send_stream(request, [chunk("a")])
        await asyncio.sleep(30)
        return response

    engine.answer = stalled
    _, content = await gateway.post(json=SAMPLED, headers={TIMEOUT_HEADER: "500"})
    assert b"the answer took longer than 0.5 s" in content
    assert len(engine.requests) == 1
    assert outcomes(gateway) == {"failed": 1}


async def test_slot_of_the_failed_engine_is_not_assigned_to_a_queued_request(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    configure(gateway.runtime, "routing", policy="AlwaysSpeculative")
    configure(gateway.runtime, "limits", max_in_flight_per_replica=1)
    # The failed engine is never checked, because no health checks run.
    configure(gateway.runtime, "timeouts", queue_seconds=1)
    queued = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if len(engine.requests) > 1:
            return await send_stream(request, [*OTHER, *WITH_USAGE])
        response = await send_stream(request, BROKEN)
        await queued.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    engine.answer = answer
    async with gateway.client.post(gateway.url + CHAT, json=SAMPLED) as stream:
        other = asyncio.create_task(gateway.post(json=SAMPLED))
        await until(lambda: len(gateway.runtime.admission) == 1, "the other request is queued")
        queued.set()
        assert (await stream.read()).endswith(DONE)
    assert (stream.headers["x-dps-pool"], outcomes(gateway)) == ("speculative", {"continued": 1})
    assert (await other)[0].headers["x-dps-pool"] == "greedy"
    assert [pool.in_flight for pool in gateway.runtime.pools.values()] == [0, 0]


async def test_answer_is_paid_and_logged_once(
    gateway: InProcessGateway, engine: ScriptedEngine, tmp_path: Path
) -> None:
    prompt = int((await gateway.post(json=chat()))[0].headers["x-dps-prompt-tokens"])
    output = await gateway.runtime.renderer.answer_tokens("ab") + USAGE["completion_tokens"]
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), tokens_per_minute=2 * (prompt + output))])
    gateway.runtime.access_log = JsonLog(tmp_path / "access.jsonl")
    for _ in range(2):
        answers(engine, BROKEN, [*OTHER, *WITH_USAGE])
        response, _ = await gateway.post(json=SAMPLED, headers={"Authorization": "Bearer sk"})
        assert response.status == 200
        for pool in gateway.runtime.pools.values():
            for replica in pool.all_replicas:
                pool.mark_available(replica)
    assert (await gateway.post(json=SAMPLED, headers={"Authorization": "Bearer sk"}))[0].status == 429
    await gateway.runtime.access_log.flush()
    entry = json.loads((tmp_path / "access.jsonl").read_text().splitlines()[0])
    assert (entry["status"], entry["prompt_tokens"], entry["output_tokens"]) == (200, prompt, output)
