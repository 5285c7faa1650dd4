"""The gateway's lifecycle: start, configuration reload, several gateways on one port, shutdown."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dps_local.processes import ChildError
from dps_testkit.data_plane import (
    CHAT,
    STEP_SECONDS,
    WITH_USAGE,
    DataPlane,
    chat,
    posted,
    read,
)
from dps_testkit.http import status_of
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


async def test_gateway_exits_if_its_tokenizer_is_missing(tmp_path: Path, data_plane: DataPlane) -> None:
    async with LocalProcesses(tmp_path, tokenizer=tmp_path / "nowhere") as processes:
        with pytest.raises(ChildError, match="exited with status 2") as error:
            await processes.start_gateway([data_plane.speculative], [data_plane.greedy])
        assert "dps gateway: model.tokenizer: " in str(error.value)


async def test_gateways_on_one_port_serve_the_same_sessions_and_survive_each_other(
    tmp_path: Path, data_plane: DataPlane
) -> None:
    """The kernel distributes new connections over the gateways that listen on a port (SO_REUSEPORT)."""
    async with LocalProcesses(tmp_path) as processes:
        redis = await processes.start_redis()
        sections = {"session": {"redisUrl": redis.url, "redisTimeoutSeconds": 10}}
        first = await processes.start_gateway([data_plane.speculative], [data_plane.greedy], sections)
        port = int(first.url.rpartition(":")[2])
        sections |= {"listen": {"port": port}}
        second = await processes.start_gateway([data_plane.speculative], [data_plane.greedy], sections)

        async def histories(messages: list[dict[str, str]], number: int) -> list[str]:
            found = []
            for session in range(number):  # each request has a new connection
                headers = {"x-session-id": f"s{session}"}
                async with posted(first.url + CHAT, chat(messages=messages), **headers) as response:
                    assert response.status == 200
                    found.append(response.headers["x-dps-history"])
            return found

        hello = {"role": "user", "content": "hello"}
        assert await histories([hello], 24) == ["new"] * 24
        served = [await each.metric("dps_requests_total", status="200") for each in (first, second)]
        assert sum(served) == 24
        assert min(served) > 0
        first.child.kill()
        conversation = [hello, {"role": "assistant", "content": "a"}, hello]
        assert await histories(conversation, 24) == ["grown"] * 24
