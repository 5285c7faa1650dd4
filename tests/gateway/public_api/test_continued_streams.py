"""Streams that another engine continues: what the client, its API key, the access log and the policy learn of it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dps_gateway.api.request import TIMEOUT_HEADER
from dps_gateway.auth import Key, Keys, digest_of
from dps_gateway.config import GatewayConfig
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
from dps_testkit.waiting import wait_until

GREEDY = chat(stream=True, temperature=0)


def chunk(text: str, name: str = "first") -> bytes:
    document = {"id": name, "created": 1, "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


BROKEN = [chunk("a"), chunk("b"), b'data: {"id":']
"""The last event is incomplete."""
OTHER = [chunk("abc", "second"), chunk("d", "second")]
WITH_USAGE = [
    b"data: " + json.dumps({"id": "second", "choices": [], "usage": USAGE}).encode() + b"\n\n",
    DONE,
]


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
    answers(engine, BROKEN, [*OTHER, *WITH_USAGE])
    _, content = await gateway.post(json=GREEDY)
    assert content == chunk("a") + chunk("b") + chunk("c") + chunk("d") + DONE
    assert outcomes(gateway) == {"continued": 1}
    assert [pool.in_flight for pool in gateway.runtime.pools.values()] == [0, 0]
    first, second = [(path, body) for path, _, body in engine.requests]
    assert first == second


async def test_incomplete_event_is_not_sent(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    answers(engine, BROKEN)
    _, content = await gateway.post(json=chat(stream=True))
    *chunks, error, rest = content.split(b"\n\n")
    assert b"\n\n".join([*chunks, b""]) == chunk("a") + chunk("b")
    assert (json.loads(error.removeprefix(b"data: "))["error"]["code"], rest) == ("upstream_broken", b"")
    assert outcomes(gateway) == {}


@pytest.mark.parametrize(
    ("other", "status", "outcome"),
    [
        ([chunk("axe", "second"), DONE], 200, "different"),
        ([chunk("a", "second"), DONE], 200, "different"),
        ([], 200, "failed"),
        ([b"no"], 500, "failed"),
    ],
    ids=["another text", "a shorter text", "an empty stream", "an error"],
)
async def test_stream_that_cannot_be_continued_ends_with_an_error_event(
    gateway: InProcessGateway, engine: ScriptedEngine, other: list[bytes], status: int, outcome: str
) -> None:
    answers(engine, BROKEN, other, status=status)
    _, content = await gateway.post(json=GREEDY)
    *chunks, error, _ = content.split(b"\n\n")
    assert b"\n\n".join([*chunks, b""]) == chunk("a") + chunk("b")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_broken"
    assert outcomes(gateway) == {outcome: 1}


async def test_stream_is_not_continued_after_the_time_that_the_client_allows(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    async def stalled(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("a"))
        await asyncio.sleep(30)
        return response

    engine.answer = stalled
    _, content = await gateway.post(json=GREEDY, headers={TIMEOUT_HEADER: "500"})
    assert b"the answer took longer than 0.5 s" in content
    assert len(engine.requests) == 1
    assert outcomes(gateway) == {"failed": 1}


async def test_slot_of_the_failed_engine_is_not_assigned_to_a_queued_request(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    config = gateway.runtime.config.model_dump(by_alias=True)
    config["routing"]["policy"] = "AlwaysSpeculative"
    config["limits"]["maxInFlightPerReplica"] = 1
    gateway.runtime.apply(GatewayConfig.model_validate(config))
    queued = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if len(engine.requests) > 1:
            return await send_stream(request, [*OTHER, *WITH_USAGE])
        response = await send_stream(request, BROKEN)
        await queued.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    async def other_is_queued() -> bool:
        return len(gateway.runtime.admission) == 1

    engine.answer = answer
    async with gateway.client.post(gateway.url + CHAT, json=GREEDY) as stream:
        other = asyncio.create_task(gateway.post(json=GREEDY))
        await wait_until(other_is_queued, "the other request is queued")
        queued.set()
        assert (await stream.read()).endswith(DONE)
    assert (stream.headers["x-dps-pool"], outcomes(gateway)) == ("speculative", {"continued": 1})
    assert (await other)[0].headers["x-dps-pool"] == "greedy"
    assert [pool.in_flight for pool in gateway.runtime.pools.values()] == [0, 0]


async def test_answer_is_paid_and_logged_once(
    gateway: InProcessGateway, engine: ScriptedEngine, tmp_path: Path
) -> None:
    total = USAGE["prompt_tokens"] + USAGE["completion_tokens"]
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), tokens_per_minute=2 * total)])
    gateway.runtime.access_log = JsonLog(tmp_path / "access.jsonl")
    for _ in range(2):
        answers(engine, BROKEN, [*OTHER, *WITH_USAGE])
        response, _ = await gateway.post(json=GREEDY, headers={"Authorization": "Bearer sk"})
        assert response.status == 200
        for pool in gateway.runtime.pools.values():
            for replica in pool.all_replicas:
                pool.mark_available(replica)
    assert (await gateway.post(json=GREEDY, headers={"Authorization": "Bearer sk"}))[0].status == 429
    await gateway.runtime.access_log.flush()
    entry = json.loads((tmp_path / "access.jsonl").read_text().splitlines()[0])
    assert (entry["status"], entry["output_tokens"]) == (200, USAGE["completion_tokens"])


async def test_policy_and_latency_metrics_do_not_learn_from_a_continued_stream(
    gateway: InProcessGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gateway.runtime.config.model_dump(by_alias=True)
    config["routing"]["policy"] = "Adaptive"
    gateway.runtime.apply(GatewayConfig.model_validate(config))
    observed: list[Any] = []
    monkeypatch.setattr(
        gateway.runtime.learning, "observe", lambda *observation: observed.append(observation)
    )

    def learned() -> list[Any]:
        pools = gateway.runtime.pools.values()
        means = [(pool.time_to_first_token_seconds, pool.time_per_output_token_seconds) for pool in pools]
        return [len(observed), *means]

    engine.stream(*OTHER, *WITH_USAGE)
    await gateway.post(json=GREEDY)
    before = learned()
    assert before[0] == 1
    answers(engine, BROKEN, [*OTHER, *WITH_USAGE])
    await gateway.post(json=GREEDY)
    assert outcomes(gateway) == {"continued": 1}
    assert learned() == before
