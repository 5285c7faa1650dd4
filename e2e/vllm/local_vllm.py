"""A pair of vLLM servers with a tiny model: one decodes greedily, the other uses suffix decoding."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dps_engines.pools import POOLS, PoolName
from dps_local.processes import Child, free_ports
from dps_local.stack import MODEL
from dps_testkit.http import status_of
from e2e.real_sglang import local_sglang

HERE = Path(__file__).parent
VLLM_VENV = Path(os.environ.get("VLLM_VENV", "/opt/vllm-cpu"))
VLLM_INSTALLED = (VLLM_VENV / ".installed").exists()
LOAD_SECONDS = 900.0
"""Time limit for loading two engines on a busy machine. Alone, they need a minute."""
STOP_SECONDS = 60.0


def prepare() -> Path:
    """Install SGLang unless it is installed, and return the folder of the tiny model."""
    local_sglang.install()
    return local_sglang.tiny_model()


@asynccontextmanager
async def running(model: Path, logs: Path) -> AsyncIterator[Mapping[PoolName, str]]:
    """Run the engines of both pools, which serve `model` as `MODEL`. Yields their base URLs."""
    ports = dict(zip(POOLS, free_ports(len(POOLS)), strict=True))
    urls = {pool: f"http://127.0.0.1:{port}" for pool, port in ports.items()}
    engines = [_engine(pool, url, _vllm(pool, model, ports[pool]), logs) for pool, url in urls.items()]
    try:
        for engine in engines:
            engine.start()
        await asyncio.gather(*(engine.wait_ready(LOAD_SECONDS) for engine in engines))
        yield urls
    finally:
        await asyncio.gather(*(engine.stop(STOP_SECONDS) for engine in engines))


def _vllm(pool: PoolName, model: Path, port: int) -> list[str]:
    mode = "suffix" if pool == "speculative" else "greedy"
    return [str(HERE / "launch-vllm"), mode, str(port), str(model), "--served-model-name", MODEL]


def _engine(pool: PoolName, url: str, command: Sequence[str], logs: Path) -> Child:
    async def ready() -> bool:
        return await status_of(f"{url}/v1/models") == 200

    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the threads of two engines would compete for the same cores
    }
    return Child(f"{pool}-engine", command, logs / f"{pool}.log", ready, environment)
