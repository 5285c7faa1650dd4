"""The system's clock jumps by an hour in both directions while a gateway serves agents.

Clocks that measure durations (timeouts, queues, the circuit breaker, slow start) must not follow it.
"""

import asyncio
import json
import platform
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from dps_local.stack import MODEL
from dps_testkit.data_plane import SLOW
from dps_testkit.processes import Gateway, LocalProcesses
from dps_testkit.traffic import LoadOptions, Row, traffic
from dps_testkit.waiting import wait_until
from tests.integration.leftovers import leaking_no_files, settled

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="the wheel of libfaketime contains a library for x86-64 only"
    ),
]

LIBRARY = files("libfaketime") / "vendor/libfaketime/src/libfaketime.so.1"
HOUR_SECONDS = 3600
AGENTS = 4
IDLE_CONNECTIONS = 12
"""One for each agent to each of the two engines, and some to Redis."""

SECTIONS: dict[str, dict[str, Any]] = {
    "limits": {"maxInFlightPerReplica": 1},  # some turns are in the queue when the clock jumps
    "session": {"ttlSeconds": HOUR_SECONDS, "redisTimeoutSeconds": 10},
    "timeouts": {"firstByteSeconds": 60, "idleSeconds": 60, "totalSeconds": 120, "queueSeconds": 60},
}


@dataclass(frozen=True)
class WallClock:
    """The system's clock as some processes read it. Their monotonic clocks are real."""

    file: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, offset_seconds: int) -> None:
        """Set the clock to this many seconds after the real time."""
        new = self.file.with_suffix(".new")
        new.write_text(f"{offset_seconds:+d}")
        new.replace(self.file)


@dataclass(frozen=True)
class GatewayWithJumpingClock:
    """A gateway whose clock jumps."""

    gateway: Gateway
    log: Path

    async def uses(self, offset_seconds: int) -> None:
        """Wait until an answered turn has the time of a clock that is this many seconds off."""

        async def logged() -> bool:
            lines = self.log.read_text().splitlines() if self.log.exists() else []
            offsets = [json.loads(line)["time"] - time.time() for line in lines[-1:]]
            return any(abs(offset - offset_seconds) < HOUR_SECONDS / 2 for offset in offsets)

        await wait_until(logged, f"the gateway's clock is {offset_seconds} s off")


async def test_no_turn_fails_and_no_session_is_forgotten_when_the_clock_jumps(tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock")
    clock.set(0)
    async with LocalProcesses(tmp_path) as processes:
        engines = await processes.start_engines("speculative", "greedy", arguments=SLOW)
        redis = await processes.start_redis()

        async def start(name: str, policy: str, session: dict[str, Any]) -> GatewayWithJumpingClock:
            log = tmp_path / f"{name}.jsonl"
            sections = SECTIONS | {
                "routing": {"policy": policy, "decisionLog": str(log)},
                "session": SECTIONS["session"] | session,
            }
            environment = clock.environment
            return GatewayWithJumpingClock(
                await processes.start_gateway(engines[:1], engines[1:], sections, environment=environment),
                log,
            )

        # Adaptive exchanges what it has learned through Redis, with the time.
        gateways = await asyncio.gather(
            start("redis", "Adaptive", {"redisUrl": redis.url}), start("memory", "DeltaPrefill", {})
        )
        async with AsyncExitStack() as stack:
            for each in gateways:
                await stack.enter_async_context(leaking_no_files(each.gateway, IDLE_CONNECTIONS))
            loads = [
                LoadOptions(f"{each.gateway.url}/v1", MODEL, agents=AGENTS, think_seconds=0.0, attempts=1)
                for each in gateways
            ]
            running = [await stack.enter_async_context(traffic(load)) for load in loads]
            rows: list[Row] = []
            for offset_seconds in (HOUR_SECONDS, -HOUR_SECONDS):
                await asyncio.gather(*(each.observe(AGENTS) for each in running))
                clock.set(offset_seconds)
                await asyncio.gather(*(each.uses(offset_seconds) for each in gateways))
                rows += await asyncio.gather(*(each.checkpoint(f"{offset_seconds:+d} s") for each in running))
        for row in rows:
            assert row.unnoticed, (row, row.troubles)
        for each in gateways:
            await settled(each.gateway, *engines)
            assert "Traceback" not in each.gateway.child.log.read_text()
