"""A Mooncake master, and the settings with which SGLang servers on the CPU use it over TCP."""

import ctypes.util
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from dps_engines.launch import MooncakeCache
from dps_local.processes import Child
from dps_operator.builders.mooncake import ARGUMENTS, COMMAND, HTTP_PORT
from dps_operator.builders.prefix_cache import MASTER_PORT
from dps_testkit.http import status_of
from e2e.prefix_cache.shared_servers import SGLANG_VERSION
from e2e.real_sglang.local_sglang import VENV
from e2e.real_sglang.local_sglang import install as install_sglang

PACKAGE = VENV / "mooncake"
INSTALL_SECONDS = 600.0
START_SECONDS = 120.0
STOP_SECONDS = 10.0
CACHE = MooncakeCache(
    f"127.0.0.1:{MASTER_PORT}", segment_bytes=256 * 2**20, owner="e2e/mooncake", version=SGLANG_VERSION
)
"""The servers' settings, from which their flags are derived as the operator derives them."""

ENVIRONMENT: Mapping[str, str] = {"MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1", "PYTHONPATH": str(PACKAGE)}
"""Of each server: the address at which the others reach it, which is that of its pod in a cluster, and the package."""


def obstacle() -> str | None:
    """Why Mooncake cannot be installed; None if it can."""
    if ctypes.util.find_library("ibverbs") is not None:
        return None
    if os.geteuid() == 0 and shutil.which("apt-get") is not None:
        return None
    return "Mooncake loads libibverbs.so.1, which only root can install, with apt-get"


def install() -> None:
    """Install Mooncake for SGLang's interpreter unless it is installed."""
    install_sglang()
    subprocess.run(
        [Path(__file__).with_name("install-mooncake"), PACKAGE], check=True, timeout=INSTALL_SECONDS
    )


@asynccontextmanager
async def mooncake_master(folder: Path) -> AsyncIterator[None]:
    """Start a master with the command line of the operator's Deployment, and wait until it is ready."""
    name, *options = (*COMMAND, *ARGUMENTS)

    async def ready() -> bool:
        return await status_of(f"http://127.0.0.1:{HTTP_PORT}/health") == 200

    master = Child("mooncake", [str(PACKAGE / "mooncake" / name), *options], folder / "mooncake.log", ready)
    master.start()
    try:
        await master.wait_ready(START_SECONDS)
        yield
    finally:
        await master.stop(STOP_SECONDS)
