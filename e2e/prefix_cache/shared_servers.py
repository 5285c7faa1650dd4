"""SGLang servers on the CPU that share a prefix cache through the plugin, as those of `dps up` do."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from dps_engines.pools import POOLS, PoolName
from dps_local.prefix_cache import plugin_folder, prepare, shared_cache
from dps_local.processes import Child, free_ports
from dps_local.sglang import Placement, SGLangOptions, sglang_command
from dps_local.stack import MODEL
from dps_testkit.http import status_of
from dps_testkit.processes import Engine
from e2e.real_sglang.local_sglang import PYTHON, install, tiny_model

LOAD_SECONDS = 900.0
"""Time limit for loading the servers on a busy machine; an idle one with two cores needs a minute."""
STOP_SECONDS = 30.0
PACKAGES_SECONDS = 600.0
SGLANG_VERSION = "0.5.23"
FETCH_THRESHOLD = 256
"""SGLang's default: a shorter part of a prefix is computed rather than fetched."""


@asynccontextmanager
async def shared_servers(folder: Path) -> AsyncIterator[Mapping[PoolName, Engine]]:
    """Start a greedy and a STANDALONE server. The pages and the logs are in the folder."""
    _install()
    prepare(folder)
    servers = {
        pool: _server(folder, pool, port) for pool, port in zip(POOLS, free_ports(len(POOLS)), strict=True)
    }
    try:
        for server in servers.values():
            server.child.start()
        await asyncio.gather(*(server.child.wait_ready(LOAD_SECONDS) for server in servers.values()))
        yield servers
    finally:
        await asyncio.gather(*(server.child.stop(STOP_SECONDS) for server in servers.values()))


def _install() -> None:
    install()
    subprocess.run([Path(__file__).with_name("install-compiler")], check=True, timeout=PACKAGES_SECONDS)


def _server(folder: Path, pool: PoolName, port: int) -> Engine:
    model = str(tiny_model())
    start = sglang_command(
        SGLangOptions(model, draft_model=model, python=str(PYTHON), version=SGLANG_VERSION),
        pool,
        Placement(()),
        port=port,
        served_name=MODEL,
        prefix_cache=shared_cache(folder),
        plugin=plugin_folder(folder),
    )
    # The last value of a flag applies. A busy machine may exceed the time limit of the policy `timeout`.
    command = [*start.command, "--hicache-storage-prefetch-policy", "wait_complete"]
    url = f"http://127.0.0.1:{port}"

    async def ready() -> bool:
        return await status_of(f"{url}/health") == 200

    return Engine(Child(pool, command, folder / f"{pool}.log", ready, start.environment), url)
