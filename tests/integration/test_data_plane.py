"""Requests in flight: bytes are relayed unchanged, clients disconnect, queues fill and engines crash."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dps_local.stack import MODEL
from dps_testkit.data_plane import (
    CHAT,
    ENDLESS,
    ENDLESS_STREAM,
    MAX_BODY_BYTES,
    SLOW,
    WITH_USAGE,
    DataPlane,
    chat,
    posted,
    read,
    refusal,
)
from dps_testkit.processes import Engine, LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


def without_ids_and_times(answer: bytes) -> bytes:
    """An answer without ids and times, which differ between equal requests."""
    without_ids = re.sub(rb'"(id|created)":("[^"]*"|\d+)', rb'"\1":0', answer)
    return re.sub(rb"\b\d+(\.\d+(e-?\d+)?|e-?\d+)\b", b"0.0", without_ids)


# -- relayed bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat(12, stream=True), id="chat"),
        pytest.param(CHAT, chat(12, stream=True, **WITH_USAGE), id="chat-with-usage"),
        pytest.param(CHAT, chat(12, stream=True, stream_options=None), id="chat-with-null-options"),
        pytest.param(CHAT, chat(12), id="chat-whole"),
        pytest.param("/v1/completions", {"model": MODEL, "prompt": "Once", "stream": True}, id="completions"),
        pytest.param(
            "/v1/completions",
            {"model": MODEL, "prompt": [1, 2, 3], "stream": True, **WITH_USAGE},
            id="completions-with-usage",
        ),
        pytest.param(
            "/generate",
            {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 12}, "stream": True},
            id="generate",
        ),
    ],
)
async def test_answer_is_relayed_byte_for_byte(
    data_plane: DataPlane, path: str, body: dict[str, Any]
) -> None:
    await read(data_plane.greedy.url + path, body)  # both measured requests must find the same tokens cached
    direct = await read(data_plane.greedy.url + path, body)
    counted = await data_plane.gateway.metric("gen_ai_client_token_usage_count")

    assert without_ids_and_times(await read(data_plane.gateway.url + path, body)) == without_ids_and_times(
        direct
    )

    async def accounted() -> bool:
        return await data_plane.gateway.metric("gen_ai_client_token_usage_count") == counted + 2

    await wait_until(accounted, "the gateway has recorded the usage, whether or not the client receives it")


async def test_stream_usage_is_sent_only_to_clients_that_request_it(data_plane: DataPlane) -> None:
    hidden = await read(data_plane.gateway.url + CHAT, chat(stream=True))
    shown = await read(data_plane.gateway.url + CHAT, chat(stream=True, **WITH_USAGE))

    assert b'"usage"' not in hidden
    assert shown.count(b'"usage":{') == 1


async def test_oversized_body_is_rejected(data_plane: DataPlane) -> None:
    async with posted(data_plane.gateway.url + CHAT, chat(user="x" * MAX_BODY_BYTES)) as response:
        assert await refusal(response) == (413, "invalid_request_error", "request_too_large", None)


# -- disconnecting and queued clients ------------------------------------------------------------------------


async def test_disconnect_mid_stream_cancels_generation(data_plane: DataPlane) -> None:
    aborted = await data_plane.aborted()
    async with posted(data_plane.gateway.url + CHAT, ENDLESS_STREAM) as response:
        await response.content.readuntil(b"\n\n")
        assert await data_plane.greedy.running() == 1
        assert await data_plane.in_flight() == 1

    await wait_until(data_plane.idle, "engine and gateway have dropped the request")
    assert await data_plane.aborted() == aborted + 1


async def test_disconnect_before_non_streaming_answer_cancels_generation(
    data_plane: DataPlane,
) -> None:
    aborted = await data_plane.aborted()
    waiting = asyncio.create_task(read(data_plane.gateway.url + CHAT, ENDLESS))

    async def generating() -> bool:
        return await data_plane.greedy.running() == 1

    await wait_until(generating, "the engine is running the request")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    await wait_until(data_plane.idle, "engine and gateway have dropped the request")
    assert await data_plane.aborted() == aborted + 1


async def test_request_beyond_queue_limit_is_rejected_with_retry_after(data_plane: DataPlane) -> None:
    url = data_plane.gateway.url + CHAT
    async with posted(url, ENDLESS_STREAM) as running:
        await running.content.readuntil(b"\n\n")
        waiting = asyncio.create_task(read(url, chat()))

        async def queued() -> bool:
            return await data_plane.gateway.metric("dps_queued") == 1

        await wait_until(queued, "the second request is queued")
        async with posted(url, chat()) as third:
            assert await refusal(third) == (429, "rate_limit_error", "overloaded", "1")

    assert json.loads(await waiting)["usage"]["completion_tokens"] == 4
    await wait_until(data_plane.idle, "no request is in flight")


async def test_disconnect_while_queued_frees_the_queue_slot(data_plane: DataPlane) -> None:
    url = data_plane.gateway.url + CHAT
    async with posted(url, ENDLESS_STREAM) as running:
        await running.content.readuntil(b"\n\n")
        waiting = asyncio.create_task(read(url, chat()))

        async def queued(count: int = 1) -> bool:
            return await data_plane.gateway.metric("dps_queued") == count

        await wait_until(queued, "the second request is queued")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await wait_until(lambda: queued(0), "the queue is empty")
    await wait_until(data_plane.idle, "no request is in flight")


# -- crashing engines ----------------------------------------------------------------------------------------


async def test_turn_fails_over_when_engines_crash_and_returns_when_they_recover(tmp_path: Path) -> None:
    async with LocalProcesses(tmp_path) as processes:
        *speculative, greedy = await processes.start_engines("speculative-1", "speculative-2", "greedy")
        gateway = await processes.start_gateway(speculative, [greedy], {"routing": {"thresholdTokens": None}})
        by_url = {engine.url: engine for engine in speculative}

        async def turn() -> tuple[int, str | None, str | None]:
            async with posted(gateway.url + CHAT, chat(), **{"x-session-id": "one"}) as response:
                headers = response.headers
                return response.status, headers.get("x-dps-pool"), headers.get("x-dps-reason")

        # The replica with the request crashes before the first byte: the other replica of the pool answers.
        for engine in speculative:
            await engine.emulate(hang=True)
        first = asyncio.create_task(turn())
        holders: list[Engine] = []

        async def held() -> bool:
            replicas = (await gateway.document("/pools"))["speculative"]["replicas"]
            holders[:] = [by_url[replica["url"]] for replica in replicas if replica["inFlight"]]
            return len(holders) == 1

        await wait_until(held, "a replica has received the request")
        (victim,) = holders
        (survivor,) = (engine for engine in speculative if engine is not victim)
        await survivor.emulate()
        victim.child.kill()
        assert await first == (200, "speculative", "within_threshold")

        # All replicas of the pool are down: the other pool answers.
        survivor.child.kill()
        assert await turn() == (200, "greedy", "failover")

        # Every engine is down: the gateway rejects the request with Retry-After.
        greedy.child.kill()

        async def none_ready() -> bool:
            return await gateway.metric("dps_ready_replicas") == 0

        await wait_until(none_ready, "the gateway reports no ready replicas")
        async with posted(gateway.url + CHAT, chat()) as response:
            assert await refusal(response) == (503, "server_error", "no_engine_ready", "1")

        # One replica restarts: health checks mark it ready.
        victim.child.start()

        async def answered() -> bool:
            return await turn() == (200, "speculative", "within_threshold")

        await wait_until(answered, "the pool answers again")


async def test_stream_ends_with_error_event_when_its_engine_crashes(
    tmp_path: Path, data_plane: DataPlane
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        (engine,) = await processes.start_engines("crashing", arguments=SLOW)
        gateway = await processes.start_gateway(
            [data_plane.speculative], [engine], {"routing": {"policy": "AlwaysGreedy"}}
        )
        async with posted(gateway.url + CHAT, ENDLESS_STREAM) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            engine.child.kill()
            events = (await response.read()).decode().split("\n\n")

        assert events.pop() == ""
        error = json.loads(events.pop().removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "upstream_broken")
        assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
        assert await gateway.metric("dps_upstream_failures_total", pool="greedy", kind="broken") == 1

        async def idle() -> bool:
            return await gateway.metric("dps_in_flight") == 0

        await wait_until(idle, "the gateway has released the request")
