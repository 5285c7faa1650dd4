"""A Mooncake master, a client of it, and the settings with which SGLang servers on the CPU use it over TCP."""

import asyncio
import ctypes.util
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dps_engines.launch import MooncakeCache
from dps_engines.sglang.prefix_cache import arguments
from dps_local.processes import Child, free_ports
from dps_local.sglang import mooncake_command
from dps_testkit.http import metric, status_of
from dps_testkit.waiting import wait_until
from e2e.prefix_cache.shared_servers import SGLANG_VERSION
from e2e.real_sglang.local_sglang import VENV
from e2e.real_sglang.local_sglang import install as install_sglang

PACKAGE = VENV / "mooncake"
BINARIES = [PACKAGE / "mooncake" / name for name in ("mooncake_master", "store.so", "engine.so")]
"""The master, and what the servers load."""
STORE_CLIENT = Path(__file__).parents[1] / "mooncake/store_client.py"
INSTALL_SECONDS = 600.0
START_SECONDS = 120.0
STOP_SECONDS = 10.0
ENVIRONMENT: Mapping[str, str] = {"MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1", "PYTHONPATH": str(PACKAGE)}
"""Of each server: the address at which the others reach it, which is that of its pod in a cluster, and the package."""


def _obstacle() -> str | None:
    """Why Mooncake cannot be installed; None if it can."""
    if ctypes.util.find_library("ibverbs") is not None:
        return None
    if os.geteuid() == 0 and shutil.which("apt-get") is not None:
        return None
    return "Mooncake loads libibverbs.so.1, which only root can install, with apt-get"


INSTALLABLE = pytest.mark.skipif(_obstacle() is not None, reason=_obstacle() or "")
MARKS = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400), INSTALLABLE]
"""Those of a module whose tests share servers with Mooncake."""


def install() -> None:
    """Install Mooncake for SGLang's interpreter unless it is installed."""
    install_sglang()
    subprocess.run(
        [Path(__file__).with_name("install-mooncake"), PACKAGE], check=True, timeout=INSTALL_SECONDS
    )


@dataclass(frozen=True)
class Master:
    """A running master.

    http: the URL of its metrics. cache: the servers' settings, from which their flags are derived as the operator
    derives them.
    """

    child: Child
    http: str
    cache: MooncakeCache

    async def capacity(self) -> float:
        """The bytes of all segments that clients have mounted."""
        return await metric(self.http, "master_total_capacity_bytes")

    async def restart(self, capacity: float) -> None:
        """Start it again after it was killed, and wait until its clients have mounted segments of this many bytes.

        Until then, pages cannot be stored, and SGLang does not store them later.
        """
        self.child.start()
        await self.child.wait_ready(START_SECONDS)

        async def mounted() -> bool:
            return await self.capacity() >= capacity

        await wait_until(mounted, f"the master's clients have mounted {capacity:.0f} bytes")


@asynccontextmanager
async def mooncake_master(folder: Path) -> AsyncIterator[Master]:
    """Start a master as `dps up` does, and wait until it is ready."""
    rpc, http = free_ports(2)
    url = f"http://127.0.0.1:{http}"

    async def ready() -> bool:
        return await status_of(f"{url}/health") == 200

    command = mooncake_command(str(VENV / "bin/python"), rpc, http)
    child = Child("mooncake", command, folder / "mooncake.log", ready, ENVIRONMENT)
    cache = MooncakeCache(
        f"127.0.0.1:{rpc}", segment_bytes=256 * 2**20, owner="e2e/mooncake", version=SGLANG_VERSION
    )
    child.start()
    try:
        await child.wait_ready(START_SECONDS)
        yield Master(child, url, cache)
    finally:
        await child.stop(STOP_SECONDS)


@asynccontextmanager
async def store_client(master: Master) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that contributes a segment in which the servers' pages are stored, too."""
    async with _client(master, "write", "written") as process:
        yield process


@asynccontextmanager
async def full_store(master: Master) -> AsyncIterator[None]:
    """There is no space for another page in the segments of the servers until the block exits."""
    async with _client(master, "fill", "full") as process:
        try:
            yield
        finally:
            await asyncio.wait_for(process.communicate(b""), STOP_SECONDS)


async def remove_pages(master: Master, tag: str) -> None:
    """Remove the pages of a process. tag: that of its metric."""
    async with _client(master, "remove", "removed", tag):
        pass


@asynccontextmanager
async def _client(
    master: Master, action: str, answer: str, key: str = "e2e"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has printed an answer after an action of `store_client.py`."""
    process = await asyncio.create_subprocess_exec(
        *(VENV / "bin/python", STORE_CLIENT, action, key, arguments(master.cache)[-1]),
        env={**os.environ, **ENVIRONMENT},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == f"{answer}\n".encode()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
