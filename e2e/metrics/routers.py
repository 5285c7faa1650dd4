"""Two local routers with engines, Redis and a gateway each: a healthy one, and one with every fault.

Another gateway belongs to a suspended DPSRouter.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from dps_local.assets import bundled_tokenizer
from dps_local.stack import MODEL
from dps_testkit.data_plane import common_cache
from dps_testkit.processes import Engine, Gateway, LocalProcesses, RedisServer
from e2e.metrics.prometheus import Target

NAMESPACE = "llm"
HEALTHY, FAULTY = "healthy", "faulty"
SPEED = ("--emulate-speed", "200")
REJECTED_DRAFTS = ("--emulate-acceptance-length", "1")
PAGES = ("--page-size", "64")
SLOW_STORAGE = ("--emulate-storage-tokens-per-second", "2000")
"""The emulated engines prefill 11,000 tokens/s."""


@dataclass(frozen=True)
class LocalRouter:
    """The processes of one router, labelled like a DPSRouter."""

    name: str
    gateway: Gateway
    speculative: Engine
    greedy: Engine
    redis: RedisServer

    def targets(self) -> list[Target]:
        """The targets that the ServiceMonitor of a DPSRouter would select, with their labels."""
        found = {
            "metrics": self.gateway.admin,
            "speculative": self.speculative.url,
            "greedy": self.greedy.url,
        }
        return [Target(url, labels(NAMESPACE, self.name, component)) for component, url in found.items()]

    async def send_session(self, topic: str) -> None:
        """Send a session with long and short turns, streaming or not. Stops at the first error."""
        messages: list[dict[str, str]] = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            for turn in range(6):
                question = f"{topic}, {turn}: " + ("and why? " if turn % 3 else "tell me of the sky. " * 60)
                messages.append({"role": "user", "content": question})
                body = {
                    "model": MODEL,
                    "messages": messages,
                    "max_tokens": 48,
                    "ignore_eos": True,
                    "stream": turn % 2 == 1,
                }
                try:
                    async with http.post(f"{self.gateway.url}/v1/chat/completions", json=body) as answer:
                        await answer.read()
                        if answer.status != 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    return
                messages.append({"role": "assistant", "content": f"Answer {turn}."})

    async def cut_streams(self) -> None:
        """Make the engines cut every stream after a few events."""
        for engine in (self.speculative, self.greedy):
            await engine.emulate(disconnect_after_chunks=3)

    def break_everything(self) -> None:
        """Kill Redis and the engines, and write an invalid configuration file."""
        for child in (self.redis.child, self.speculative.child, self.greedy.child):
            child.kill()
        self.gateway.configure(_misspell)


@asynccontextmanager
async def local_routers(folder: Path) -> AsyncIterator[tuple[LocalRouter, LocalRouter, Gateway]]:
    """Run the healthy and the faulty router, and the gateway of a suspended one.

    The engines of the faulty router reject all drafts, have slow storage, and use a different chat template from its
    gateway's. The last gateway has the same engines, so that it loses them with the faulty router.
    """
    async with (
        LocalProcesses(folder) as processes,
        LocalProcesses(folder, other_template(folder / "other-tokenizer")) as other,
    ):
        healthy, faulty = ([*common_cache(folder / name), *PAGES] for name in (HEALTHY, FAULTY))
        first, second = await asyncio.gather(
            _router(HEALTHY, processes, processes, healthy, ()),
            _router(FAULTY, processes, other, [*faulty, *SLOW_STORAGE], REJECTED_DRAFTS),
        )
        yield first, second, await _gateway(processes, second.speculative, second.greedy, first.redis)


@asynccontextmanager
async def traffic(*routers: LocalRouter) -> AsyncIterator[None]:
    """Send sessions to all routers until the block exits."""

    async def send_sessions(router: LocalRouter) -> None:
        number = 0
        while True:
            await router.send_session(f"Session {number}")
            await asyncio.sleep(0.5)
            number += 1

    tasks = [asyncio.create_task(send_sessions(router)) for router in routers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def other_template(folder: Path) -> Path:
    """The bundled tokenizer with a chat template that adds a word to every prompt."""
    shutil.copytree(bundled_tokenizer(), folder)
    file = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"chat_template": settings["chat_template"] + "Well, "}))
    return folder


async def _router(
    name: str,
    gateways: LocalProcesses,
    engines: LocalProcesses,
    storage: Sequence[str],
    speculation: Sequence[str],
) -> LocalRouter:
    drafts = ("--speculative-algorithm", "STANDALONE", *speculation)
    redis, (speculative,), (greedy,) = await asyncio.gather(
        gateways.start_redis(),
        engines.start_engines(f"{name}-speculative", arguments=[*SPEED, *storage, *drafts]),
        engines.start_engines(f"{name}-greedy", arguments=[*SPEED, *storage]),
    )
    return LocalRouter(name, await _gateway(gateways, speculative, greedy, redis), speculative, greedy, redis)


async def _gateway(
    processes: LocalProcesses, speculative: Engine, greedy: Engine, redis: RedisServer
) -> Gateway:
    session = {"redisUrl": redis.url, "redisTimeoutSeconds": 2.0}
    return await processes.start_gateway([speculative], [greedy], {"session": session})


def labels(namespace: str, router: str, component: str) -> Mapping[str, str]:
    """The labels of a target, as those of a pod that belongs to a DPSRouter."""
    return {
        "namespace": namespace,
        "dpsrouter_io_router": router,
        "dpsrouter_io_component": component,
        "pod": f"{router}-{component}-0",
    }


def _misspell(configuration: dict[str, Any]) -> None:
    configuration["routing"] = {"polisy": "DeltaPrefill"}
