"""A local stack: Redis, gateways and two engines as processes of this machine. Engines are emulated by default."""

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import orjson

from dps_engines.launch import EngineError, MooncakeCache
from dps_engines.pools import POOLS, PoolName
from dps_engines.sglang.prefix_cache import arguments as prefix_cache_arguments
from dps_local.gateway_config import gateway_config, write_gateway_config
from dps_local.machine import gpus
from dps_local.processes import Child, ChildError, free_ports, get_if_ok, is_ok
from dps_local.redis_server import answers_ping, redis_command
from dps_local.sglang import (
    SGLANG,
    EngineCommand,
    Placement,
    SGLangOptions,
    mooncake_command,
    place,
    sglang_command,
)
from dps_sglang.install import install

DPS = (sys.executable, "-P", "-m", "dps_cli")
"""The command line that runs `dps`, even if it is not on PATH."""
MODEL = "Qwen/Qwen2.5-7B-Instruct"
START_SECONDS = 90.0
"""Timeout for the start of each process, unless SGLang loads a model."""
ENGINE_STOP_SECONDS = 30.0
SEGMENT_BYTES = 4 * 2**30
"""The host memory that each SGLang server contributes to a common prefix cache."""
REDIS_TIMEOUT_SECONDS = 1.0
"""Longer than the gateway's default, because all processes share the cores of one machine, which may delay any."""


@dataclass(frozen=True)
class StackOptions:
    """The options of a local stack.

    tokenizer: a folder with tokenizer.json and a chat template or, unless engines are emulated, a Hub id.
    model: the served model name.
    threshold_tokens: τ. None sends every turn to the speculative pool.
    engine_urls: URLs of engines that are already running, by pool.
    sglang: start SGLang servers. If neither `sglang` nor `engine_urls` is set, engines are emulated.
    prefix_cache: whether the engines that this stack starts share a prefix cache.
    speed: emulated seconds per real second.
    serialized_speculation: the emulated speculative engine processes one request at a time, as in the paper's
    Table 2.
    otlp_endpoint: OTLP/gRPC receiver of the gateways' and SGLang's spans, such as http://127.0.0.1:4317.
    port, admin_port: ports of the first gateway; the other gateways use the following ones. None selects free ports.
    """

    tokenizer: Path | str
    model: str = MODEL
    gateways: int = 1
    policy: str = "DeltaPrefill"
    threshold_tokens: int | None = 128
    engine_urls: Mapping[PoolName, str] | None = None
    sglang: SGLangOptions | None = None
    prefix_cache: Literal["separate", "common"] = "separate"
    speed: float = 1.0
    serialized_speculation: bool = False
    otlp_endpoint: str | None = None
    port: int | None = None
    admin_port: int | None = None


class LocalStack:
    """An async context manager that starts all processes, waits until they are ready, and stops them on exit.

    The constructor raises EngineError if SGLang cannot be started with these options. Entering raises ChildError,
    with the end of the log, if a process does not become ready; then the folder with the logs is kept.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        redis, master, master_http = free_ports(3)
        listen, admin = free_ports(options.gateways), free_ports(options.gateways)
        engines = dict(zip(POOLS, free_ports(len(POOLS)), strict=True)) if options.engine_urls is None else {}
        if options.port is not None:
            listen = list(range(options.port, options.port + options.gateways))
        if options.admin_port is not None:
            admin = list(range(options.admin_port, options.admin_port + options.gateways))
        self.placements: dict[PoolName, Placement] = {}
        """The devices of the SGLang servers; empty unless this stack starts SGLang."""
        if options.sglang is not None:
            self.placements = place(gpus(), options.sglang.tensor_parallel)
        self.folder = Path(tempfile.mkdtemp(prefix="dps-"))
        """Holds the logs, the gateways' configuration files, Redis' working directory, the plugin for SGLang, and the
        common prefix cache of emulated engines."""
        self._plugin = self.folder / "plugin"
        self._cache: MooncakeCache | None = None
        if options.prefix_cache == "common":
            version = SGLANG.version(None, options.sglang.version if options.sglang is not None else None)
            self._cache = MooncakeCache(f"127.0.0.1:{master}", SEGMENT_BYTES, owner="dps up", version=version)
        try:
            self.engines = {pool: self._engine(pool, port) for pool, port in engines.items()}
            """The engine processes; empty with `StackOptions.engine_urls`."""
        except EngineError:
            self.folder.rmdir()
            raise
        self.redis_url = f"redis://127.0.0.1:{redis}/0"
        self.engine_urls: Mapping[PoolName, str] = options.engine_urls or {
            pool: f"http://127.0.0.1:{port}" for pool, port in engines.items()
        }
        self.urls = [f"http://127.0.0.1:{port}/v1" for port in listen]
        self.admin_urls = [f"http://127.0.0.1:{port}" for port in admin]
        self.redis = self._child("redis", redis_command(redis, self.folder), lambda: answers_ping(redis))
        self.mooncake: Child | None = None
        """The master of the SGLang servers' common prefix cache."""
        if options.sglang is not None and self._cache is not None:
            command = mooncake_command(options.sglang.python, master, master_http)
            url = f"http://127.0.0.1:{master_http}/health"
            self.mooncake = self._child("mooncake", command, lambda: is_ok(url))
            install(self._plugin)
        self.gateways = [
            self._gateway(index, *ports) for index, ports in enumerate(zip(listen, admin, strict=True))
        ]

    async def start_gateway(self, index: int) -> None:
        """Restart a killed gateway on the same ports and wait until it is ready."""
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
            # A gateway assumes that engines are available until its first health check, which may have failed since.
            await asyncio.gather(*(child.wait_ready() for child in self.gateways))
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def _start_engines(self, seconds: float) -> None:
        if self.mooncake is not None:  # without the master, the engines exit
            self.mooncake.start()
            await self.mooncake.wait_ready(seconds)
        for name, engine in self.engines.items():
            engine.start()
            if name in self.placements and self.placements[name].shared:
                # Servers on the same GPUs start one after the other, as each sizes its cache by the free memory.
                await engine.wait_ready(seconds)
        await asyncio.gather(*(engine.wait_ready(seconds) for engine in self.engines.values()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(child.stop() for child in self.gateways))
        await asyncio.gather(*(engine.stop(ENGINE_STOP_SECONDS) for engine in self.engines.values()))
        for child in (self.redis, self.mooncake):
            if child is not None:
                await child.stop()
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

    def _engine(self, pool: PoolName, port: int) -> Child:
        options = self.options
        if options.sglang is None:
            start = EngineCommand(self._emulated(pool, port), {})
        else:
            start = sglang_command(
                options.sglang,
                pool,
                self.placements[pool],
                port=port,
                served_name=options.model,
                otlp_endpoint=options.otlp_endpoint,
                prefix_cache=self._cache,
                plugin=self._plugin,
            )
        url = f"http://127.0.0.1:{port}/health"
        return self._child(f"{pool}-engine", start.command, lambda: is_ok(url), start.environment)

    def _emulated(self, pool: PoolName, port: int) -> list[str]:
        options = self.options
        command = [*DPS, "engine", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model-path", options.model, "--served-model-name", options.model]
        command += ["--tokenizer-path", str(options.tokenizer)]
        command += ["--enable-cache-report", "--emulate-speed", str(options.speed)]
        if pool == "speculative":
            command += ["--speculative-algorithm", "STANDALONE"]
            if options.serialized_speculation:
                command.append("--emulate-serialized-speculation")
        if self._cache is not None:
            command += prefix_cache_arguments(self._cache)
            command += ["--emulate-storage-directory", str(self.folder / "prefix-cache")]
        return command

    def _gateway(self, index: int, port: int, admin_port: int) -> Child:
        name = f"gateway-{index + 1}"
        file = self.folder / f"{name}.yaml"
        write_gateway_config(file, self._configuration(port, admin_port))
        command = [*DPS, "gateway", "--config", str(file)]
        admin_url = f"http://127.0.0.1:{admin_port}"
        return self._child(name, command, lambda: _both_pools_are_ready(admin_url))

    def _configuration(self, port: int, admin_port: int) -> dict[str, dict[str, Any]]:
        options = self.options
        sglang = options.sglang
        # The revision of the model's own tokenizer.
        revision = sglang.revision if sglang is not None and sglang.tokenizer is None else None
        return gateway_config(
            port=port,
            admin_port=admin_port,
            model=options.model,
            tokenizer=options.tokenizer,
            endpoints={pool: [url] for pool, url in self.engine_urls.items()},
            sections={
                "routing": {
                    "policy": options.policy,
                    "thresholdTokens": options.threshold_tokens,
                    "commonPrefixCache": options.prefix_cache == "common",
                },
                "session": {
                    "redisUrl": self.redis_url,
                    "redisTimeoutSeconds": REDIS_TIMEOUT_SECONDS,
                },
                "timeouts": {"drainDelaySeconds": 0},
                "telemetry": {"otlpEndpoint": options.otlp_endpoint},
                "model": {} if revision is None else {"revision": revision},
            },
        )


async def _both_pools_are_ready(admin_url: str) -> bool:
    """Whether a gateway has a ready engine in each pool. Its own readiness requires only one."""
    pools = await get_if_ok(f"{admin_url}/pools")
    return pools is not None and all(pool["readyReplicas"] for pool in orjson.loads(pools).values())


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` and return its result. SIGINT or SIGTERM cancel it; then the result is 130 or 143.

    Further signals do not interrupt the cleanup of the cancelled `work`, which stops its processes within time limits.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:
            task.cancel()
        received.append(number)

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
