"""Engines, gateways and Redis servers as child processes on free ports of 127.0.0.1."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml
from redis.asyncio import Redis

from dps_local.assets import bundled_tokenizer
from dps_local.gateway_config import gateway_config, write_gateway_config
from dps_local.processes import Child, free_ports
from dps_local.redis_server import IN_MEMORY, REDIS_SERVER, answers_ping, redis_command
from dps_local.stack import DPS, MODEL
from dps_testkit.http import metric, status_of
from dps_testkit.waiting import PATIENCE_SECONDS


@dataclass(frozen=True)
class Engine:
    """An emulated SGLang server."""

    child: Child
    url: str

    async def emulate(self, **faults: Any) -> None:
        """Inject faults (dps_local.emulated_sglang.faults). Without arguments, clear them."""
        async with aiohttp.ClientSession() as http, http.post(f"{self.url}/emulate", json=faults) as response:
            response.raise_for_status()

    async def running(self) -> float:
        """Number of running requests."""
        return await metric(self.url, "sglang:num_running_reqs")


@dataclass(frozen=True)
class Gateway:
    """A gateway process. `url` and `admin` are the base URLs of its public and admin ports."""

    child: Child
    url: str
    admin: str
    file: Path

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        return await metric(self.admin, name, **labels)

    async def document(self, path: str) -> Any:
        """A JSON document from the admin port."""
        async with aiohttp.ClientSession() as http, http.get(self.admin + path) as response:
            return await response.json()

    def configure(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Edit the configuration file of the running gateway."""
        configuration = yaml.safe_load(self.file.read_text())
        change(configuration)
        self.file.write_text(yaml.safe_dump(configuration))


@dataclass(frozen=True)
class RedisServer:
    """A Redis or Valkey server."""

    child: Child
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, password: str = "") -> "Redis":
        """A new client; use it as an async context manager."""
        return Redis.from_url(self.url, password=password or None)


class LocalProcesses:
    """An async context manager that starts processes and stops all of them on exit."""

    def __init__(self, folder: Path, tokenizer: Path | None = None) -> None:
        self._folder = folder
        self._tokenizer = tokenizer or bundled_tokenizer()
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(child.stop() for child in reversed(self._children)))

    async def start_engines(
        self, *names: str, arguments: Sequence[str] = ("--emulate-speed", "200")
    ) -> list[Engine]:
        """Start one engine per name."""
        ports = free_ports(len(names))
        engines = [
            Engine(self._engine(name, port, arguments), f"http://127.0.0.1:{port}")
            for name, port in zip(names, ports, strict=True)
        ]
        await asyncio.gather(*(engine.child.wait_ready(seconds=PATIENCE_SECONDS) for engine in engines))
        return engines

    async def start_gateway(
        self,
        speculative: Sequence[Engine],
        greedy: Sequence[Engine],
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        admin_port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Gateway:
        """Start a gateway for these engines. `sections` override the default configuration, key by key.

        environment: added to this process's environment.
        """
        port, free_admin_port = free_ports(2)
        admin_port = admin_port or free_admin_port
        timeouts = {"drainDelaySeconds": 0, "drainSeconds": 1, "healthIntervalSeconds": 1}
        sections = dict(sections or {})
        config = gateway_config(
            port=port,
            admin_port=admin_port,
            model=MODEL,
            tokenizer=self._tokenizer,
            endpoints={
                "speculative": [engine.url for engine in speculative],
                "greedy": [engine.url for engine in greedy],
            },
            sections=sections | {"timeouts": timeouts | dict(sections.get("timeouts", {}))},
        )
        return await self._run_gateway(self._folder / f"gateway-{port}.yaml", config, environment)

    async def start_gateway_of(
        self, file: Path, config: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> Gateway:
        """Start a gateway with this configuration, at free ports of 127.0.0.1. It is written to `file`."""
        port, admin_port = free_ports(2)
        listen = {**config["listen"], "host": "127.0.0.1", "port": port, "adminPort": admin_port}
        return await self._run_gateway(file, {**config, "listen": listen}, environment)

    async def _run_gateway(
        self, file: Path, config: Mapping[str, Any], environment: Mapping[str, str] | None
    ) -> Gateway:
        write_gateway_config(file, config)
        listen = config["listen"]
        url, admin = (f"http://127.0.0.1:{listen[name]}" for name in ("port", "adminPort"))

        async def ready() -> bool:
            return await status_of(f"{admin}/readyz") == 200

        command = [*DPS, "gateway", "--config", str(file)]
        child = self._start(file.stem, command, ready, environment)
        await child.wait_ready(seconds=PATIENCE_SECONDS)
        return Gateway(child, url, admin, file)

    async def start_redis(
        self, *arguments: str, binary: Path = REDIS_SERVER, port: int | None = None
    ) -> RedisServer:
        """Start a Redis server without persistence, or a sentinel if `arguments` contain `--sentinel`."""
        port = port or free_ports(1)[0]
        folder = self._folder / f"redis-{port}"
        folder.mkdir()
        server = RedisServer(self._redis(port, folder, binary, arguments), port)
        await server.child.wait_ready(seconds=PATIENCE_SECONDS)
        return server

    def _redis(self, port: int, folder: Path, binary: Path, arguments: Sequence[str]) -> Child:
        if "--sentinel" in arguments:
            configuration = folder / "sentinel.conf"
            configuration.touch()
            command = redis_command(port, folder, arguments, binary)
            command.insert(1, str(configuration))
        else:
            command = redis_command(port, folder, [*IN_MEMORY, *arguments], binary)

        async def ready() -> bool:
            return await answers_ping(port)

        return self._start(f"redis-{port}", command, ready)

    def _engine(self, name: str, port: int, arguments: Sequence[str]) -> Child:
        command = [*DPS, "engine", "--port", str(port), "--model-path", MODEL, "--enable-cache-report"]
        command += ["--tokenizer-path", str(self._tokenizer), *arguments]

        async def ready() -> bool:
            return await status_of(f"http://127.0.0.1:{port}/health") == 200

        return self._start(f"engine-{name}-{port}", command, ready)

    def _start(
        self,
        name: str,
        command: Sequence[str],
        ready: Callable[[], Awaitable[bool]],
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        child = Child(name, command, self._folder / f"{name}.log", ready, environment)
        self._children.append(child)
        child.start()
        return child
