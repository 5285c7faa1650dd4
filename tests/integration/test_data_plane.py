"""What happens to requests on their way: clients that leave, engines that die, queues, drains, bytes."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.site import Engine, Gateway, Site, eventually, metric, metric_over

from dps_lab.children import ChildError

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

CHAT = "/v1/chat/completions"
STEP_SECONDS = 0.02
SLOW = ("--emulate-decode-step-seconds", str(STEP_SECONDS), "0.0001")
MAX_BODY_BYTES = 100_000


def chat(tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A chat request whose answer has so many tokens."""
    return {
        "model": "any",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        **fields,
    }


ENDLESS = chat(20_000)
ENDLESS_STREAM = chat(20_000, stream=True)


@dataclass(frozen=True)
class Plane:
    """A gateway that sends everything to the greedy engine, one request at a time, and lets one more wait."""

    site: Site
    speculative: Engine
    greedy: Engine
    gateway: Gateway

    async def in_flight(self) -> float:
        return await self.gateway.metric("dps_in_flight")

    async def idle(self) -> bool:
        return await self.greedy.running() == 0 and await self.in_flight() == 0

    async def aborted(self) -> float:
        return await metric(self.greedy.url, "sglang:num_aborted_requests_total")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Plane]:
    async with Site(tmp_path_factory.mktemp("plane")) as site:
        speculative, greedy = await site.engines("speculative", "greedy", arguments=SLOW)
        gateway = await site.gateway(
            [speculative],
            [greedy],
            {
                "routing": {"policy": "AlwaysGreedy"},
                "limits": {"maxBodyBytes": MAX_BODY_BYTES, "maxInFlightPerReplica": 1, "maxQueued": 1},
            },
        )
        yield Plane(site, speculative, greedy, gateway)


@asynccontextmanager
async def posted(url: str, body: Mapping[str, Any], **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to a POST on a connection of its own, which is cut when the block is left early."""
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        yield response


async def read(url: str, body: Mapping[str, Any]) -> bytes:
    async with posted(url, body) as response:
        assert response.status == 200
        return await response.read()


async def refusal(response: aiohttp.ClientResponse) -> tuple[int, str, str, str | None]:
    """Status, type and code of an OpenAI error object, and Retry-After."""
    error = (await response.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status, error["type"], error["code"], response.headers.get("Retry-After")


def timeless(answer: bytes) -> bytes:
    """An engine's answer without ids and times: what differs from one answer to the next."""
    without_ids = re.sub(rb'"(id|created)":("[^"]*"|\d+)', rb'"\1":0', answer)
    return re.sub(rb"\b\d+(\.\d+(e-?\d+)?|e-?\d+)\b", b"0.0", without_ids)


# -- bytes ------------------------------------------------------------------------------------------------------


USAGE_ASKED: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat(12, stream=True), id="chat"),
        pytest.param(CHAT, chat(12, stream=True, **USAGE_ASKED), id="chat-with-usage"),
        pytest.param(CHAT, chat(12, stream=True, stream_options=None), id="chat-with-null-options"),
        pytest.param(CHAT, chat(12), id="chat-whole"),
        pytest.param("/v1/completions", {"model": "any", "prompt": "Once", "stream": True}, id="completions"),
        pytest.param(
            "/v1/completions",
            {"model": "any", "prompt": [1, 2, 3], "stream": True, **USAGE_ASKED},
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

    await eventually(accounted, "the gateway took the usage in, whether the client sees it or not")


async def test_the_usage_of_a_stream_is_shown_to_who_asks(plane: Plane) -> None:
    hidden = await read(plane.gateway.url + CHAT, chat(stream=True))
    shown = await read(plane.gateway.url + CHAT, chat(stream=True, **USAGE_ASKED))

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

    await eventually(plane.idle, "engine and gateway have dropped the request")
    assert await plane.aborted() == aborted + 1


async def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_ends_the_generation(
    plane: Plane,
) -> None:
    aborted = await plane.aborted()
    waiting = asyncio.create_task(read(plane.gateway.url + CHAT, ENDLESS))

    async def generating() -> bool:
        return await plane.greedy.running() == 1

    await eventually(generating, "the engine works on the request")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    await eventually(plane.idle, "engine and gateway have dropped the request")
    assert await plane.aborted() == aborted + 1


async def test_one_waits_for_a_place_and_the_next_is_told_to_come_back(plane: Plane) -> None:
    url = plane.gateway.url + CHAT
    async with posted(url, ENDLESS_STREAM) as running:
        await running.content.readuntil(b"\n\n")
        waiting = asyncio.create_task(read(url, chat()))

        async def queued() -> bool:
            return await plane.gateway.metric("dps_queued") == 1

        await eventually(queued, "the second request waits")
        async with posted(url, chat()) as third:
            assert await refusal(third) == (429, "rate_limit_error", "overloaded", "1")

    assert json.loads(await waiting)["usage"]["completion_tokens"] == 4
    await eventually(plane.idle, "nothing is left")


async def test_one_who_stops_waiting_leaves_the_queue(plane: Plane) -> None:
    url = plane.gateway.url + CHAT
    async with posted(url, ENDLESS_STREAM) as running:
        await running.content.readuntil(b"\n\n")
        waiting = asyncio.create_task(read(url, chat()))

        async def queued(count: int = 1) -> bool:
            return await plane.gateway.metric("dps_queued") == count

        await eventually(queued, "the second request waits")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await eventually(lambda: queued(0), "nobody waits any more")
    await eventually(plane.idle, "nothing is left")


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

        await eventually(held, "a replica has the request")
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

        await eventually(nobody_ready, "the gateway has noticed")
        async with posted(gateway.url + CHAT, chat()) as response:
            assert await refusal(response) == (503, "server_error", "no_engine_ready", "1")

        # One is back: health checks find it.
        victim.child.start()

        async def answered() -> bool:
            return await turn() == (200, "speculative", "within_threshold")

        await eventually(answered, "the pool answers again")


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

        await eventually(idle, "the gateway has let go of the request")


# -- the gateway's own life ---------------------------------------------------------------------------------------


async def test_a_gateway_that_is_told_to_stop_finishes_its_streams_and_takes_no_more(
    tmp_path: Path, plane: Plane
) -> None:
    tokens = int(7 / STEP_SECONDS)
    async with Site(tmp_path) as site, aiohttp.ClientSession() as kept_alive:
        gateway = await site.gateway(
            [plane.speculative],
            [plane.greedy],
            {"routing": {"policy": "AlwaysGreedy"}, "timeouts": {"drainDelaySeconds": 5, "drainSeconds": 60}},
        )
        async with posted(gateway.url + CHAT, chat(tokens, stream=True, **USAGE_ASKED)) as response:
            first = await response.content.readuntil(b"\n\n")
            stopped = asyncio.create_task(gateway.child.stop(seconds=60))

            async def not_ready() -> bool:
                async with kept_alive.get(f"{gateway.admin}/readyz") as probe:
                    return probe.status == 503

            await eventually(not_ready, "the gateway says that it is going away")
            async with posted(gateway.url + CHAT, chat()) as another:
                assert await refusal(another) == (503, "server_error", "draining", "1")
            rest = await response.read()
        events = (first + rest).decode().split("\n\n")

        assert events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] == tokens
        await stopped
        with pytest.raises(aiohttp.ClientConnectorError):
            await read(gateway.url + CHAT, chat())


async def test_a_new_threshold_is_taken_on_without_a_restart_and_a_bad_file_is_refused(
    tmp_path: Path, plane: Plane
) -> None:
    async with Site(tmp_path) as site:
        gateway = await site.gateway(
            [plane.speculative], [plane.greedy], {"routing": {"thresholdTokens": 10_000}}
        )
        process = gateway.child.pid

        async def pool() -> str:
            async with posted(gateway.url + CHAT, chat()) as response:
                return response.headers["x-dps-pool"]

        async def valid() -> float:
            return await gateway.metric("dps_config_valid")

        assert (await pool(), await valid()) == ("speculative", 1)

        gateway.configure(lambda configuration: configuration["routing"].update(thresholdTokens=0))

        async def greedy() -> bool:
            return await pool() == "greedy"

        await eventually(greedy, "the new threshold is in force")

        gateway.configure(lambda configuration: configuration["routing"].update(thresholdTokens=-1))

        async def refused() -> bool:
            return await valid() == 0

        await eventually(refused, "a file that cannot be used is told")
        assert await pool() == "greedy"
        assert "routing.thresholdTokens" in gateway.child.tail()

        gateway.configure(lambda configuration: configuration["routing"].update(thresholdTokens=10_000))

        async def speculative() -> bool:
            return await valid() == 1 and await pool() == "speculative"

        await eventually(speculative, "a good file is taken on again")
        assert gateway.child.pid == process


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_tokenizer_that_is_not_there_stops_the_start(
    workers: int, tmp_path: Path, plane: Plane
) -> None:
    async with Site(tmp_path, tokenizer=tmp_path / "nowhere") as site:
        with pytest.raises(ChildError, match="ended with status 2") as error:
            await site.gateway([plane.speculative], [plane.greedy], {"listen": {"workers": workers}})
        assert "dps gateway: model.tokenizer: " in str(error.value)


def workers_of(gateway: Gateway) -> list[int]:
    """The process ids of a gateway's workers."""
    children = Path(f"/proc/{gateway.child.pid}/task/{gateway.child.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.skipif(sys.platform != "linux", reason="a worker is found by /proc")
async def test_two_workers_serve_one_port_and_their_metrics_add_up(tmp_path: Path, plane: Plane) -> None:
    streams = 15  # odd, so that the two loads are never equal
    async with Site(tmp_path) as site, aiohttp.ClientSession() as http:
        (engine,) = await site.engines("only", arguments=SLOW)
        gateway = await site.gateway(
            [engine], [engine], {"listen": {"workers": 2}, "routing": {"policy": "AlwaysGreedy"}}
        )

        async def listening(count: int = 2) -> bool:
            return gateway.child.log.read_text().count("listening on") == count

        await eventually(listening, "both workers listen")
        await asyncio.gather(*(read(gateway.url + CHAT, chat()) for _ in range(streams)))
        assert await gateway.metric("dps_requests_total", status="200") == streams

        running = await asyncio.gather(
            *(
                http.post(gateway.url + CHAT, json=ENDLESS_STREAM, headers={"Connection": "close"})
                for _ in range(streams)
            )
        )
        loads: set[int] = set()

        async def both_told() -> bool:
            loads.add((await gateway.document("/pools"))["greedy"]["inFlight"])
            return len(loads) == 2

        await eventually(both_told, "each worker has told its own load")
        assert sum(loads) == streams

        async def added_up() -> bool:
            return await metric_over(http, gateway.admin, "dps_in_flight", pool="greedy") == streams

        await eventually(added_up, "one worker tells the load of both")

        os.kill(workers_of(gateway)[0], signal.SIGKILL)
        await eventually(lambda: listening(3), "the lost worker is replaced")

        async def forgotten() -> bool:
            return await gateway.metric("dps_in_flight", pool="greedy") in loads

        await eventually(forgotten, "the load of the lost worker is told no more")
        for response in running:
            response.close()
