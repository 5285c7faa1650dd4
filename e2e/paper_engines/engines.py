"""Pairs of real engines with a tiny model: one decodes greedily, the other speculates by a method of the paper."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from dps_engines.pools import POOLS, PoolName
from dps_local.assets import cached
from dps_local.processes import Child, free_ports
from dps_local.stack import MODEL
from dps_testkit.http import status_of
from dps_testkit.paths import ROOT
from e2e.real_sglang import local_sglang

Method = Literal["D: Transformers", "E: vLLM"]

HERE = Path(__file__).parent
TRANSFORMERS_PYTHON = local_sglang.VENV / "bin/python"
"""SGLang's environment has all that the server of method D needs."""
VLLM_VENV = Path(os.environ.get("VLLM_VENV", "/opt/vllm-cpu"))
VLLM_INSTALLED = (VLLM_VENV / ".installed").exists()
MODEL_SECONDS = 300.0
LOAD_SECONDS = 900.0
"""Time limit for loading two engines on a busy machine. Alone, vLLM needs a minute and Transformers ten seconds."""
STOP_SECONDS = 60.0
CONFIDENCE = 0.02
"""A model with random weights gives a low probability even to its most probable token."""


def prepare() -> Path:
    """Install SGLang unless it is installed, and return the folder of the tiny model."""
    local_sglang.install()
    return local_sglang.tiny_model()


@asynccontextmanager
async def running(method: Method, model: Path, logs: Path) -> AsyncIterator[Mapping[PoolName, str]]:
    """Run the engines of both pools, which serve `model` as `MODEL`. Yields their base URLs."""
    ports = dict(zip(POOLS, free_ports(len(POOLS)), strict=True))
    if method == "E: vLLM":
        commands = {pool: _vllm(pool, model, port) for pool, port in ports.items()}
    else:
        draft = await asyncio.to_thread(_draft_of, model)
        commands = {pool: _transformers(pool, model, draft, port) for pool, port in ports.items()}
    urls = {pool: f"http://127.0.0.1:{port}" for pool, port in ports.items()}
    engines = [_engine(pool, url, commands[pool], logs) for pool, url in urls.items()]
    try:
        for engine in engines:
            engine.start()
        await asyncio.gather(*(engine.wait_ready(LOAD_SECONDS) for engine in engines))
        yield urls
    finally:
        await asyncio.gather(*(engine.stop(STOP_SECONDS) for engine in engines))


def _transformers(pool: PoolName, model: Path, draft: Path, port: int) -> list[str]:
    command = [str(TRANSFORMERS_PYTHON), "-m", "e2e.paper_engines.assisted_server"]
    command += ["--model", str(model), "--served-model-name", MODEL, "--port", str(port)]
    drafting = ["--draft-model", str(draft), "--confidence", str(CONFIDENCE)]
    return [*command, *drafting] if pool == "speculative" else command


def _vllm(pool: PoolName, model: Path, port: int) -> list[str]:
    mode = "suffix" if pool == "speculative" else "greedy"
    return [str(HERE / "launch-vllm"), mode, str(port), str(model), "--served-model-name", MODEL]


def _engine(pool: PoolName, url: str, command: Sequence[str], logs: Path) -> Child:
    async def ready() -> bool:
        return await status_of(f"{url}/v1/models") == 200

    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the threads of two engines would compete for the same cores
        "PYTHONPATH": str(ROOT),
    }
    return Child(f"{pool}-engine", command, logs / f"{pool}.log", ready, environment)


def _draft_of(target: Path) -> Path:
    """The folder of a draft model for the tiny model."""

    def make(_scratch: Path, folder: Path) -> None:
        command = [TRANSFORMERS_PYTHON, HERE / "make_draft_model.py", target, folder]
        subprocess.run(command, check=True, timeout=MODEL_SECONDS)

    return cached(f"{target.name}-draft-1", make)
