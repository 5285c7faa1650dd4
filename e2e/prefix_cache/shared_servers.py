"""SGLang servers on the CPU with the plugin, as those of `dps up`."""

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dps_engines.launch import WITHOUT_DRAFT_MODEL, Algorithm, MooncakeCache
from dps_engines.pools import PoolName
from dps_local.processes import Child, free_ports
from dps_local.sglang import Placement, SGLangOptions, sglang_command
from dps_local.stack import MODEL
from dps_sglang.install import install as install_plugin
from dps_testkit.http import status_of
from dps_testkit.processes import Engine
from e2e.prefix_cache.hicache import install
from e2e.real_sglang.local_sglang import PYTHON, tiny_model

LOAD_SECONDS = 900.0
"""Time limit for loading the servers on a busy machine; an idle one with two cores needs a minute."""
STOP_SECONDS = 30.0
SGLANG_VERSION = "0.5.23"
FETCH_THRESHOLD = 256
"""SGLang's default: a shorter part of a prefix is computed rather than fetched."""


SERVERS: Mapping[str, tuple[PoolName, Algorithm]] = {
    "greedy": ("greedy", "Standalone"),
    "STANDALONE": ("speculative", "Standalone"),
    "NGRAM": ("speculative", "Ngram"),
}
"""The pool of each server, and the algorithm of that stack's speculative pool."""
NO_ENVIRONMENT: Mapping[str, str] = {}


@asynccontextmanager
async def shared_servers(
    folder: Path,
    kinds: Iterable[str] = SERVERS,
    cache: MooncakeCache | None = None,
    environment: Mapping[str, str] = NO_ENVIRONMENT,
    model: Path | None = None,
    options: Sequence[str] = (),
    omitted: Collection[str] = (),
) -> AsyncIterator[Mapping[str, Engine]]:
    """Start a server of each kind. The logs are in the folder.

    cache: what they share; None if they share no pages. environment: added to the servers' environment; a PYTHONPATH
    is appended. model: the tiny model if None. options: appended to the command lines. omitted: arguments to leave out
    of them.
    """
    install()
    install_plugin(folder / "plugin")
    model = model or tiny_model()
    servers = {kind: _server(folder, kind, model, cache, environment, options, omitted) for kind in kinds}
    try:
        for server in servers.values():
            server.child.start()
        await asyncio.gather(*(server.child.wait_ready(LOAD_SECONDS) for server in servers.values()))
        yield servers
    finally:
        await asyncio.gather(*(server.child.stop(STOP_SECONDS) for server in servers.values()))


def _server(
    folder: Path,
    kind: str,
    model: Path,
    cache: MooncakeCache | None,
    environment: Mapping[str, str],
    options: Sequence[str],
    omitted: Collection[str],
) -> Engine:
    (port,) = free_ports(1)
    pool, algorithm = SERVERS[kind]
    start = sglang_command(
        SGLangOptions(
            str(model),
            draft_model=None if algorithm in WITHOUT_DRAFT_MODEL else str(model),
            algorithm=algorithm,
            python=str(PYTHON),
            version=SGLANG_VERSION,
        ),
        pool,
        Placement(()),
        port=port,
        served_name=MODEL,
        prefix_cache=cache,
        plugin=folder / "plugin",
    )
    # The last value of a flag applies. A busy machine may exceed the time limit of the policy `timeout`, and other
    # processes may allocate more of its memory than SGLang expects while the server loads. The default capacity of
    # NGRAM needs 1.5 GB.
    command = [
        *(argument for argument in start.command if argument not in omitted),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--mem-fraction-static", "0.8"),
        *("--speculative-ngram-capacity", "100000"),
        *options,
    ]
    own = {"PYTHONPATH": str(folder / "plugin")} if cache is None else start.environment
    path = os.pathsep.join(each["PYTHONPATH"] for each in (own, environment) if "PYTHONPATH" in each)
    url = f"http://127.0.0.1:{port}"

    async def ready() -> bool:
        return await status_of(f"{url}/health") == 200

    variables = {**start.environment, **environment, "PYTHONPATH": path}
    return Engine(Child(kind, command, folder / f"{kind}.log", ready, variables), url)
