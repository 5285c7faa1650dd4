"""The contenders: the gateway, vllm-router with two policies, LiteLLM's proxy, and a direct connection."""

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import yaml

from dps_lab.bench.traffic import MODEL
from dps_local.gateway_config import gateway_config, write_gateway_config
from dps_local.processes import free_ports

GATEWAY: Final = "dps gateway"
ROUND_ROBIN: Final = "vllm-router round_robin"
CACHE_AWARE: Final = "vllm-router cache_aware"
LITELLM: Final = "LiteLLM"
NOTHING: Final = "no router"

VLLM_ROUTER: Final = "vllm-router==0.1.17"
LITELLM_PROXY: Final = "litellm[proxy]==1.108.7"


@dataclass(frozen=True)
class Contender:
    """A router under test. `command` is None for the direct connection to the fake engine.

    The direct connection shows the highest rate that the harness can measure, and is the baseline for the time that a
    router adds. ready: a URL that returns status 200 once the router accepts requests.
    """

    name: str
    command: tuple[str, ...] | None
    port: int
    ready: str


def install_peer(cache: Path, requirement: str) -> Path:
    """Install a peer from PyPI into its own virtual environment and return the folder with its commands.

    The environment is created on the first call. Raises subprocess.CalledProcessError if PyPI is unreachable.
    """
    home = cache / f"bench-{requirement.partition('[')[0].partition('=')[0]}"
    installed = home / ".installed"
    if not installed.exists() or installed.read_text() != requirement:
        venv.create(home, clear=True, with_pip=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, requirement], check=True)
        installed.write_text(requirement)
    return home / "bin"


def contenders(
    directory: Path, engines: list[str], redis_port: int, tokenizer: Path, cache: Path
) -> list[Contender]:
    """The contenders, with the URLs of two engines. cache: the folder in which peers are installed.

    `cache_aware` is the default policy of vllm-router. With it, vllm-router 0.1.17 has every prompt rendered and
    tokenized by both engines, which costs four more requests if the engine, like SGLang, does not have
    /v1/chat/completions/render. It is therefore also measured with `round_robin`.
    """
    vllm_router = install_peer(cache, VLLM_ROUTER)
    return [
        gateway(directory, engines, redis_port, tokenizer),
        *(_vllm_router(vllm_router, name, engines) for name in (ROUND_ROBIN, CACHE_AWARE)),
        _litellm(install_peer(cache, LITELLM_PROXY), directory, engines),
        Contender(NOTHING, None, urlsplit(engines[0]).port or 0, f"{engines[0]}/health"),
    ]


def _vllm_router(commands: Path, name: str, engines: list[str]) -> Contender:
    port, metrics = free_ports(2)
    command = [str(commands / "python"), "-m", "vllm_router.launch_router"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    command += ["--policy", name.split()[1], "--log-level", "error", "--worker-urls", *engines]
    return Contender(name, tuple(command), port, f"http://127.0.0.1:{port}/v1/models")


def _litellm(commands: Path, directory: Path, engines: list[str]) -> Contender:
    """LiteLLM's proxy with one worker, one core being the limit, and with the settings that it recommends.

    They are those of its page on production (docs.litellm.ai/docs/proxy/prod), without a database and alerts.
    """
    (port,) = free_ports(1)
    config = {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
            }
            for url in engines
        ],
        # Like the other routers, it accepts every client.
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        "litellm_settings": {"request_timeout": 600, "set_verbose": False, "json_logs": True},
    }
    file = directory / "litellm.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = ["env", "LITELLM_MODE=PRODUCTION", "LITELLM_LOG=ERROR", "LITELLM_LOCAL_MODEL_COST_MAP=True"]
    command = [*environment, str(commands / "litellm"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--config", str(file), "--num_workers", "1"]
    return Contender(LITELLM, tuple(command), port, f"http://127.0.0.1:{port}/health/readiness")


def gateway(directory: Path, engines: list[str], redis_port: int, tokenizer: Path) -> Contender:
    """The gateway with one speculative and one greedy engine, and sessions in Redis."""
    port, admin_port = free_ports(2)
    speculative, greedy = engines
    config = gateway_config(
        port=port,
        admin_port=admin_port,
        model=MODEL,
        tokenizer=tokenizer,
        endpoints={"speculative": [speculative], "greedy": [greedy]},
        sections={
            "routing": {"policy": "DeltaPrefill", "thresholdTokens": 128},
            "session": {"redisUrl": f"redis://127.0.0.1:{redis_port}/0"},
        },
    )
    file = directory / f"gateway-{port}.yaml"
    write_gateway_config(file, config)
    command = (sys.executable, "-P", "-m", "dps_cli", "gateway", "--config", str(file))
    return Contender(GATEWAY, command, port, f"http://127.0.0.1:{admin_port}/readyz")
