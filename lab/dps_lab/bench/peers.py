"""The contenders: the gateway, two routers from PyPI, a minimal proxy, and a direct connection."""

import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dps_lab.bench.traffic import MODEL
from dps_local.gateway_config import gateway_config, write_gateway_config
from dps_local.processes import free_ports

GATEWAY: Final = "dps gateway"
VLLM: Final = "vllm-router round_robin"
VLLM_CACHE_AWARE: Final = "vllm-router cache_aware"
SGLANG: Final = "sglang-router cache_aware"
BARE: Final = "bare aiohttp proxy"
NOTHING: Final = "no router"

REQUIREMENTS: Final = ("vllm-router==0.1.17", "sglang-router==0.3.2")


@dataclass(frozen=True)
class Contender:
    """A router under test. `command` is None for the direct connection to the fake engine.

    The direct connection shows the highest rate that the harness can measure, and is the baseline for the time that a
    router adds.
    """

    name: str
    command: tuple[str, ...] | None
    port: int
    admin_port: int | None = None

    @property
    def ready(self) -> str:
        """A URL that returns status 200 once the router accepts requests."""
        if self.admin_port is not None:
            return f"http://127.0.0.1:{self.admin_port}/readyz"
        return f"http://127.0.0.1:{self.port}/v1/models"


def install_peers(cache: Path) -> Path:
    """Install the routers from PyPI into a virtual environment and return its Python interpreter.

    The environment is created on the first call. Raises subprocess.CalledProcessError if PyPI is unreachable.
    """
    home = cache / "bench-peers"
    python, installed = home / "bin" / "python", home / ".installed"
    requirements = "\n".join(REQUIREMENTS)
    if not installed.exists() or installed.read_text() != requirements:
        venv.create(home, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *REQUIREMENTS], check=True)
        installed.write_text(requirements)
    return python


def contenders(
    directory: Path, upstreams: list[str], redis_port: int, tokenizer: Path, peers_python: Path
) -> list[Contender]:
    """The contenders of the request path benchmark."""
    return [
        gateway(directory, upstreams, redis_port, tokenizer),
        *rust_routers(peers_python, upstreams),
        bare_proxy(upstreams),
        Contender(NOTHING, None, urlsplit(upstreams[0]).port or 0),
    ]


def bare_proxy(upstreams: list[str]) -> Contender:
    """The minimal proxy in `bare_proxy.py`."""
    (port,) = free_ports(1)
    return Contender(BARE, (sys.executable, "-m", "dps_lab.bench.bare_proxy", str(port), *upstreams), port)


def rust_routers(python: Path, upstreams: list[str]) -> list[Contender]:
    """vllm-router and sglang-router with two workers, each of which both prefills and decodes.

    `cache_aware` is the default policy of both. With it, vllm-router 0.1.17 has every prompt rendered and tokenized by
    both workers, which costs four more requests if the engine, like SGLang, does not have
    /v1/chat/completions/render. It is therefore also measured with `round_robin`, which is the reference
    for relative rates.
    """
    return [_rust_router(python, name, upstreams) for name in (VLLM, VLLM_CACHE_AWARE, SGLANG)]


def _rust_router(python: Path, name: str, upstreams: list[str]) -> Contender:
    package, policy = name.split()
    port, metrics = free_ports(2)
    command = [str(python), "-m", f"{package.replace('-', '_')}.launch_router"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    command += ["--policy", policy, "--log-level", "error", "--worker-urls", *upstreams]
    return Contender(name, tuple(command), port)


def gateway(
    directory: Path,
    upstreams: list[str],
    redis_port: int,
    tokenizer: Path,
    name: str = GATEWAY,
    *,
    workers: int = 1,
    sections: Mapping[str, Mapping[str, object]] | None = None,
) -> Contender:
    """The gateway with one speculative and one greedy engine, and sessions in Redis.

    sections: more sections of the gateway's configuration.
    """
    port, admin_port = free_ports(2)
    speculative, greedy = upstreams
    config = gateway_config(
        port=port,
        admin_port=admin_port,
        model=MODEL,
        tokenizer=tokenizer,
        endpoints={"speculative": [speculative], "greedy": [greedy]},
        sections={
            "listen": {"workers": workers},
            "routing": {"policy": "DeltaPrefill", "thresholdTokens": 128},
            "session": {"redisUrl": f"redis://127.0.0.1:{redis_port}/0"},
            **(sections or {}),
        },
    )
    file = directory / f"gateway-{port}.yaml"
    write_gateway_config(file, config)
    dps = Path(sys.executable).with_name("dps")
    return Contender(name, (str(dps), "gateway", "--config", str(file)), port, admin_port)
