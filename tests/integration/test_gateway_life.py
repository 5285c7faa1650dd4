"""The gateway's lifecycle: start, configuration reload, several worker processes, shutdown."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dps_local.processes import ChildError
from dps_testkit.data_plane import (
    CHAT,
    ENDLESS_STREAM,
    SLOW,
    STEP_SECONDS,
    WITH_USAGE,
    DataPlane,
    chat,
    posted,
    read,
)
from dps_testkit.http import metric_over, status_of
from dps_testkit.processes import LocalProcesses
from dps_testkit.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


async def test_terminating_gateway_answers_all_requests_and_closes_connections(
    tmp_path: Path, data_plane: DataPlane
) -> None:
    """Load balancers notice a terminating replica late, so requests that still arrive must be answered."""
    tokens = int(8 / STEP_SECONDS)
    async with LocalProcesses(tmp_path) as processes, aiohttp.ClientSession() as session:
        gateway = await processes.start_gateway(
            [data_plane.speculative],
            [data_plane.greedy],
            {"routing": {"policy": "AlwaysGreedy"}, "timeouts": {"drainDelaySeconds": 6, "drainSeconds": 60}},
        )

        async def connection(method: str, path: str, **options: Any) -> tuple[int, str | None]:
            async with session.request(method, gateway.url + path, **options) as response:
                await response.read()
                return response.status, response.headers.get("Connection")

        assert await connection("POST", CHAT, json=chat()) == (200, None)
        async with posted(gateway.url + CHAT, chat(tokens, stream=True, **WITH_USAGE)) as response:
            first = await response.content.readuntil(b"\n\n")
            stopped = asyncio.create_task(gateway.child.stop(seconds=60))

            async def not_ready() -> bool:
                return await status_of(f"{gateway.admin}/readyz") == 503

            await wait_until(not_ready, "the gateway reports that it is not ready")
            answers = [
                await connection("POST", CHAT, json=chat()),
                await connection("POST", CHAT, json=chat(stream=True)),
                await connection("GET", "/v1/models"),
                await connection("POST", CHAT, data=b"no JSON"),
            ]
            rest = await response.read()
        events = (first + rest).decode().split("\n\n")

        assert answers == [(200, "close"), (200, "close"), (200, "close"), (400, "close")]
        assert events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] == tokens
        await stopped
        with pytest.raises(aiohttp.ClientConnectorError):
            await read(gateway.url + CHAT, chat())


async def test_configuration_is_reloaded_without_restart_and_an_invalid_file_is_rejected(
    tmp_path: Path, data_plane: DataPlane
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        gateway = await processes.start_gateway(
            [data_plane.speculative], [data_plane.greedy], {"routing": {"thresholdTokens": 10_000}}
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

        await wait_until(greedy, "the new threshold is in force")

        gateway.configure(lambda configuration: configuration["routing"].update(thresholdTokens=-1))

        async def refused() -> bool:
            return await valid() == 0

        await wait_until(refused, "the invalid file is reported")
        assert await pool() == "greedy"
        assert "routing.thresholdTokens" in gateway.child.tail()

        gateway.configure(lambda configuration: configuration["routing"].update(thresholdTokens=10_000))

        async def speculative() -> bool:
            return await valid() == 1 and await pool() == "speculative"

        await wait_until(speculative, "a valid file is applied again")
        assert gateway.child.pid == process


@pytest.mark.parametrize("workers", [1, 2])
async def test_gateway_exits_if_its_tokenizer_is_missing(
    workers: int, tmp_path: Path, data_plane: DataPlane
) -> None:
    async with LocalProcesses(tmp_path, tokenizer=tmp_path / "nowhere") as processes:
        with pytest.raises(ChildError, match="exited with status 2") as error:
            await processes.start_gateway(
                [data_plane.speculative], [data_plane.greedy], {"listen": {"workers": workers}}
            )
        assert "dps gateway: model.tokenizer: " in str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="finding the workers requires /proc")
async def test_two_workers_serve_one_port_and_their_metrics_add_up(
    tmp_path: Path, data_plane: DataPlane
) -> None:
    streams = 15  # odd, so that the loads of two workers always differ
    async with LocalProcesses(tmp_path) as processes, aiohttp.ClientSession() as http:
        (engine,) = await processes.start_engines("only", arguments=SLOW)
        gateway = await processes.start_gateway(
            [engine], [engine], {"listen": {"workers": 2}, "routing": {"policy": "AlwaysGreedy"}}
        )
        await gateway.wait_for_workers(2)
        await asyncio.gather(*(read(gateway.url + CHAT, chat()) for _ in range(streams)))
        assert await gateway.metric("dps_requests_total", status="200") == streams

        running = await asyncio.gather(
            *(
                http.post(gateway.url + CHAT, json=ENDLESS_STREAM, headers={"Connection": "close"})
                for _ in range(streams)
            )
        )
        loads: set[int] = set()

        async def both_reported() -> bool:
            loads.add((await gateway.document("/pools"))["greedy"]["inFlight"])
            return len(loads) == 2

        await wait_until(both_reported, "each worker has reported its own load")
        assert sum(loads) == streams

        async def summed() -> bool:
            return await metric_over(http, gateway.admin, "dps_in_flight", pool="greedy") == streams

        await wait_until(summed, "one worker reports the load of both")

        os.kill(gateway.workers[0], signal.SIGKILL)
        await gateway.wait_for_workers(3)  # the killed one is replaced

        async def removed() -> bool:
            return await gateway.metric("dps_in_flight", pool="greedy") in loads

        await wait_until(removed, "the load of the killed worker is no longer reported")
        for response in running:
            response.close()


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="finding the workers requires /proc")
async def test_workers_share_session_state_without_redis_and_stop_when_their_parent_is_killed(
    tmp_path: Path, data_plane: DataPlane
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        (engine,) = await processes.start_engines("only")
        gateway = await processes.start_gateway([engine], [engine], {"listen": {"workers": 2}})
        await gateway.wait_for_workers(2)
        hello = {"role": "user", "content": "hello"}
        histories = []
        for number in range(12):  # on fresh connections, which the kernel distributes over both workers
            for messages in ([hello], [hello, {"role": "assistant", "content": "a"}, hello]):
                body = chat(messages=messages)
                async with posted(gateway.url + CHAT, body, **{"x-session-id": str(number)}) as response:
                    await response.read()
                    histories.append(response.headers["x-dps-history"])
        assert histories == ["new", "grown"] * 12

        workers = gateway.workers
        os.kill(gateway.child.pid, signal.SIGKILL)

        async def gone() -> bool:
            return not any(map(is_running, workers))

        await wait_until(gone, "the workers have stopped")
