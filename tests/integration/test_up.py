"""`dps up` starts a complete local stack and leaves no process behind."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from dps_local.processes import free_ports
from dps_local.stack import DPS
from dps_testkit.data_plane import CHAT, chat
from dps_testkit.http import metric, status_of
from dps_testkit.processes import LocalProcesses
from dps_testkit.waiting import wait_until


def children_of(pid: int) -> list[Path]:
    """The /proc folders of a process's children."""
    return [Path("/proc") / child for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def contains(file: Path, text: str) -> bool:
    return text in await asyncio.to_thread(file.read_text)


@asynccontextmanager
async def running(*arguments: str, output: Path = Path(os.devnull)) -> AsyncIterator[tuple[str, int]]:
    """Run `dps up`; yields its URL and process id. It is interrupted on exit and must leave no process behind."""
    (port,) = free_ports(1)
    with output.open("w") as out:
        up = await asyncio.create_subprocess_exec(*DPS, "up", "--port", str(port), *arguments, stdout=out)
    url = f"http://127.0.0.1:{port}"
    try:

        async def serves() -> bool:
            assert up.returncode is None, "dps up has exited"
            return await status_of(f"{url}/v1/models") == 200

        await wait_until(serves, "the stack serves")
        yield url, up.pid
    finally:
        children = children_of(up.pid)
        up.send_signal(signal.SIGINT)
        assert await up.wait() == 128 + signal.SIGINT
    assert [process for process in children if process.exists()] == []


async def test_exit_of_one_process_is_reported_and_the_others_keep_running(tmp_path: Path) -> None:
    output = tmp_path / "output"
    async with running("--speed", "100", output=output) as (url, up):
        await wait_until(lambda: contains(output, "Press Ctrl-C"), "all processes are ready")
        async with aiohttp.ClientSession() as http, http.post(url + CHAT, json=chat()) as response:
            assert (response.status, response.headers["x-dps-state"]) == (200, "redis")
        engine = next(child for child in children_of(up) if b"STANDALONE" in (child / "cmdline").read_bytes())
        os.kill(int(engine.name), signal.SIGKILL)

        report = "speculative-engine has exited; see its log: "
        await wait_until(lambda: contains(output, report), "the exit of the engine is reported")
        async with aiohttp.ClientSession() as http, http.post(url + CHAT, json=chat()) as response:
            assert (response.status, response.headers["x-dps-pool"]) == (200, "greedy")


async def test_existing_engines_are_queried_for_their_model_and_keep_running(
    tmp_path: Path,
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy")
        async with (
            running("--speculative-url", speculative.url, "--greedy-url", f"{greedy.url}/v1") as (url, _),
            aiohttp.ClientSession() as http,
        ):
            async with http.post(url + CHAT, json=chat()) as response:
                answer = await response.json()
                assert response.status == 200
            decision = {
                name: response.headers[f"x-dps-{name}"] for name in ("pool", "prompt-tokens", "state")
            }
            assert decision == {
                "pool": "speculative",
                "prompt-tokens": str(answer["usage"]["prompt_tokens"]),
                "state": "redis",
            }
        served = [await metric(engine.url, "sglang:num_requests_total") for engine in (speculative, greedy)]
        assert served == [1, 0]
