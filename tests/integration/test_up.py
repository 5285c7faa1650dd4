"""`dps up`: one command, a whole stack, and nothing left of it."""

import asyncio
import signal
from pathlib import Path

import aiohttp
from support.plane import CHAT, chat
from support.site import eventually, status_of

from dps_lab.children import free_ports
from dps_lab.local import DPS


def children_of(pid: int) -> list[Path]:
    """The running children of a process, as /proc shows them."""
    return [Path("/proc") / child for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_the_stack_serves_until_it_is_interrupted() -> None:
    (port,) = free_ports(1)
    up = await asyncio.create_subprocess_exec(*DPS, "up", "--port", str(port), "--speed", "100")
    url = f"http://127.0.0.1:{port}"
    try:

        async def serves() -> bool:
            assert up.returncode is None, "dps up has ended"
            return await status_of(f"{url}/v1/models") == 200

        await eventually(serves, "the stack serves")
        async with aiohttp.ClientSession() as http, http.post(url + CHAT, json=chat()) as response:
            assert (response.status, response.headers["x-dps-state"]) == (200, "redis")
    finally:
        children = children_of(up.pid)
        up.send_signal(signal.SIGINT)
        assert await up.wait() == 128 + signal.SIGINT
    assert [process for process in children if process.exists()] == []
