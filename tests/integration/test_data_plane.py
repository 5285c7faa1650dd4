"""Requests in flight: bytes are relayed unchanged, clients disconnect, queues fill and engines crash."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from dps_local.stack import MODEL
from dps_testkit.data_plane import (
    CHAT,
    ENDLESS_STREAM,
    WITH_USAGE,
    DataPlane,
    chat,
    posted,
    read,
    refusal,
)
from dps_testkit.processes import Engine, LocalProcesses
from dps_testkit.waiting import wait_until
from tests.integration.leftovers import replicas_ready

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


# -- disconnecting and queued clients ------------------------------------------------------------------------


async def test_disconnect_mid_stream_cancels_generation(data_plane: DataPlane) -> None:
    aborted = await data_plane.aborted()
    async with posted(data_plane.gateway.url + CHAT, ENDLESS_STREAM) as response:
        await response.content.readuntil(b"\n\n")
        assert await data_plane.greedy.running() == 1
        assert await data_plane.in_flight() == 1

    await wait_until(data_plane.idle, "engine and gateway have dropped the request")
    assert await data_plane.aborted() == aborted + 1


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
        await replicas_ready(gateway, 0)
        async with posted(gateway.url + CHAT, chat()) as response:
            assert await refusal(response) == (503, "server_error", "no_engine_ready", "1")

        # One replica restarts: health checks mark it ready.
        victim.child.start()

        async def answered() -> bool:
            return await turn() == (200, "speculative", "within_threshold")

        await wait_until(answered, "the pool answers again")
