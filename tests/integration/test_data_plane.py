"""What happens to requests on their way: clients that leave, engines that die, queues, bytes."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dps_testkit.plane import (
    CHAT,
    ENDLESS,
    ENDLESS_STREAM,
    MAX_BODY_BYTES,
    SLOW,
    WITH_USAGE,
    Plane,
    chat,
    posted,
    read,
    refusal,
)
from dps_testkit.processes import Engine, Site
from dps_testkit.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


def timeless(answer: bytes) -> bytes:
    """An engine's answer without ids and times: what differs from one answer to the next."""
    without_ids = re.sub(rb'"(id|created)":("[^"]*"|\d+)', rb'"\1":0', answer)
    return re.sub(rb"\b\d+(\.\d+(e-?\d+)?|e-?\d+)\b", b"0.0", without_ids)


# -- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat(12, stream=True), id="chat"),
        pytest.param(CHAT, chat(12, stream=True, **WITH_USAGE), id="chat-with-usage"),
        pytest.param(CHAT, chat(12, stream=True, stream_options=None), id="chat-with-null-options"),
        pytest.param(CHAT, chat(12), id="chat-whole"),
        pytest.param("/v1/completions", {"model": "any", "prompt": "Once", "stream": True}, id="completions"),
        pytest.param(
            "/v1/completions",
            {"model": "any", "prompt": [1, 2, 3], "stream": True, **WITH_USAGE},
            id="completions-with-usage",
        ),
        pytest.param(
            "/generate",
            {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 12}, "stream": True},
            id="generate",
        ),
    ],
)
async def test_a_client_reads_the_bytes_that_the_engine_wrote(
    plane: Plane, path: str, body: dict[str, Any]
) -> None:
    await read(plane.greedy.url + path, body)  # so that both find the same tokens cached
    direct = await read(plane.greedy.url + path, body)
    counted = await plane.gateway.metric("gen_ai_client_token_usage_count")

    assert timeless(await read(plane.gateway.url + path, body)) == timeless(direct)

    async def accounted() -> bool:
        return await plane.gateway.metric("gen_ai_client_token_usage_count") == counted + 2

    await wait_until(accounted, "the gateway took the usage in, whether the client sees it or not")


async def test_the_usage_of_a_stream_is_shown_to_who_asks(plane: Plane) -> None:
    hidden = await read(plane.gateway.url + CHAT, chat(stream=True))
    shown = await read(plane.gateway.url + CHAT, chat(stream=True, **WITH_USAGE))

    assert b'"usage"' not in hidden
    assert shown.count(b'"usage":{') == 1


async def test_a_body_that_is_too_large_is_refused(plane: Plane) -> None:
    async with posted(plane.gateway.url + CHAT, chat(user="x" * MAX_BODY_BYTES)) as response:
        assert await refusal(response) == (413, "invalid_request_error", "request_too_large", None)


# -- clients that leave, and those who wait -----------------------------------------------------------------------


async def test_a_client_that_leaves_in_mid_stream_ends_the_generation(plane: Plane) -> None:
    aborted = await plane.aborted()
    async with posted(plane.gateway.url + CHAT, ENDLESS_STREAM) as response:
        await response.content.readuntil(b"\n\n")
        assert await plane.greedy.running() == 1
        assert await plane.in_flight() == 1

    await wait_until(plane.idle, "engine and gateway have dropped the request")
    assert await plane.aborted() == aborted + 1


async def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_ends_the_generation(
    plane: Plane,
) -> None:
    aborted = await plane.aborted()
    waiting = asyncio.create_task(read(plane.gateway.url + CHAT, ENDLESS))

    async def generating() -> bool:
        return await plane.greedy.running() == 1

    await wait_until(generating, "the engine works on the request")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    await wait_until(plane.idle, "engine and gateway have dropped the request")
    assert await plane.aborted() == aborted + 1


async def test_one_waits_for_a_place_and_the_next_is_told_to_come_back(plane: Plane) -> None:
    url = plane.gateway.url + CHAT
    async with posted(url, ENDLESS_STREAM) as running:
        await running.content.readuntil(b"\n\n")
        waiting = asyncio.create_task(read(url, chat()))

        async def queued() -> bool:
            return await plane.gateway.metric("dps_queued") == 1

        await wait_until(queued, "the second request waits")
        async with posted(url, chat()) as third:
            assert await refusal(third) == (429, "rate_limit_error", "overloaded", "1")

    assert json.loads(await waiting)["usage"]["completion_tokens"] == 4
    await wait_until(plane.idle, "nothing is left")


async def test_one_who_stops_waiting_leaves_the_queue(plane: Plane) -> None:
    url = plane.gateway.url + CHAT
    async with posted(url, ENDLESS_STREAM) as running:
        await running.content.readuntil(b"\n\n")
        waiting = asyncio.create_task(read(url, chat()))

        async def queued(count: int = 1) -> bool:
            return await plane.gateway.metric("dps_queued") == count

        await wait_until(queued, "the second request waits")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await wait_until(lambda: queued(0), "nobody waits any more")
    await wait_until(plane.idle, "nothing is left")


# -- engines that die ---------------------------------------------------------------------------------------------


async def test_a_turn_goes_on_elsewhere_as_engines_die_and_comes_back_with_them(tmp_path: Path) -> None:
    async with Site(tmp_path) as site:
        *speculative, greedy = await site.engines("speculative-1", "speculative-2", "greedy")
        gateway = await site.gateway(speculative, [greedy], {"routing": {"thresholdTokens": None}})
        by_url = {engine.url: engine for engine in speculative}

        async def turn() -> tuple[int, str | None, str | None]:
            async with posted(gateway.url + CHAT, chat(), **{"x-session-id": "one"}) as response:
                headers = response.headers
                return response.status, headers.get("x-dps-pool"), headers.get("x-dps-reason")

        # The replica that has the request dies before the first byte: its neighbour answers.
        for engine in speculative:
            await engine.emulate(hang=True)
        first = asyncio.create_task(turn())
        holders: list[Engine] = []

        async def held() -> bool:
            replicas = (await gateway.document("/pools"))["speculative"]["replicas"]
            holders[:] = [by_url[replica["url"]] for replica in replicas if replica["inFlight"]]
            return len(holders) == 1

        await wait_until(held, "a replica has the request")
        (victim,) = holders
        (survivor,) = (engine for engine in speculative if engine is not victim)
        await survivor.emulate()
        victim.child.kill()
        assert await first == (200, "speculative", "within_threshold")

        # The whole pool is gone: the other one answers.
        survivor.child.kill()
        assert await turn() == (200, "greedy", "failover")

        # Nobody is left: a refusal that says when to come back.
        greedy.child.kill()

        async def nobody_ready() -> bool:
            return await gateway.metric("dps_ready_replicas") == 0

        await wait_until(nobody_ready, "the gateway has noticed")
        async with posted(gateway.url + CHAT, chat()) as response:
            assert await refusal(response) == (503, "server_error", "no_engine_ready", "1")

        # One is back: health checks find it.
        victim.child.start()

        async def answered() -> bool:
            return await turn() == (200, "speculative", "within_threshold")

        await wait_until(answered, "the pool answers again")


async def test_a_stream_whose_engine_dies_ends_with_an_error_event(tmp_path: Path, plane: Plane) -> None:
    async with Site(tmp_path) as site:
        (mortal,) = await site.engines("mortal", arguments=SLOW)
        gateway = await site.gateway([plane.speculative], [mortal], {"routing": {"policy": "AlwaysGreedy"}})
        async with posted(gateway.url + CHAT, ENDLESS_STREAM) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            mortal.child.kill()
            events = (await response.read()).decode().split("\n\n")

        assert events.pop() == ""
        error = json.loads(events.pop().removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "upstream_broken")
        assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
        assert await gateway.metric("dps_upstream_failures_total", pool="greedy", kind="broken") == 1

        async def idle() -> bool:
            return await gateway.metric("dps_in_flight") == 0

        await wait_until(idle, "the gateway has let go of the request")
