"""Redis fails under load in several ways: no request fails, and state is in Redis again afterwards."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest

from dps_lab.replay.client import Client, ReplayOptions
from dps_lab.replay.records import TurnRecord
from dps_local.stack import MODEL
from dps_testkit.http import status_of
from dps_testkit.processes import Engine, Gateway, LocalProcesses, RedisServer
from dps_testkit.sessions import decided, expected, play, synthetic_sessions
from dps_testkit.waiting import wait_until
from tests.integration.leftovers import leaking_no_files, settled

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

REDIS_TIMEOUT_SECONDS = 1.0
"""The time limit is longer than a session store needs, so that a busy machine does not look like a fault."""
LONGEST_WAIT_SECONDS = 30.0
"""The limit is shorter than the latency of a request that waits for Redis during the whole outage."""

BEFORE, DURING_FAULT, WITHOUT, HEALED, AFTER = (range(first, first + 3) for first in (1, 4, 7, 10, 13))
TURNS = AFTER[-1]

IDLE_CONNECTIONS = 24
"""One for each of the eight sessions to each of the two engines, and some to Redis."""

NAMED, UNNAMED = synthetic_sessions(4, TURNS, "named"), synthetic_sessions(4, TURNS, "unnamed")
EXPECTED = expected([*NAMED, *UNNAMED])


Step = Callable[[RedisServer], Coroutine[None, None, None]]


@dataclass(frozen=True)
class Fault:
    """A fault of Redis, its repair, and the value of `x-dps-state` in between."""

    name: str
    inject: Step
    heal: Step
    state: str
    arguments: Sequence[str] = ()

    def __str__(self) -> str:
        return self.name


async def stop(server: RedisServer) -> None:
    await server.child.stop()


async def start(server: RedisServer) -> None:
    server.child.start()
    await server.child.wait_ready()


async def freeze(server: RedisServer) -> None:
    server.child.signal(signal.SIGSTOP)


async def thaw(server: RedisServer) -> None:
    server.child.signal(signal.SIGCONT)


async def fill(server: RedisServer) -> None:
    async with server.client() as redis:
        await redis.config_set("maxmemory-policy", "noeviction")
        await redis.config_set("maxmemory", 1)


async def make_room(server: RedisServer) -> None:
    async with server.client() as redis:
        await redis.config_set("maxmemory", 0)


async def flush(server: RedisServer) -> None:
    async with server.client() as redis:
        await redis.flushall()


async def restart_empty(server: RedisServer) -> None:
    server.child.kill()
    await start(server)


OUTAGES = [
    Fault("stopped", stop, start, state="mirror", arguments=("--save", "3600 1")),
    Fault("frozen", freeze, thaw, state="mirror"),
    Fault("full", fill, make_room, state="redis"),
]


class Traffic:
    """Eight concurrent sessions on one gateway: four with a session id, four recognised by their history."""

    def __init__(self, http: aiohttp.ClientSession, gateway: Gateway) -> None:
        options = ReplayOptions([f"{gateway.url}/v1"], MODEL, attempts=1, read_seconds=LONGEST_WAIT_SECONDS)
        self.named = Client(http, options)
        self.unnamed = Client(http, replace(options, session_ids="none"))
        self.records: list[TurnRecord] = []

    async def run(self, turns: Sequence[int]) -> list[TurnRecord]:
        played = await asyncio.gather(
            *(play(self.named, session, turns) for session in NAMED),
            *(play(self.unnamed, session, turns) for session in UNNAMED),
        )
        records = [record for session in played for record in session]
        self.records += records
        return records


@asynccontextmanager
async def running(
    folder: Path, engines: tuple[Engine, Engine], arguments: Sequence[str]
) -> AsyncIterator[tuple[Traffic, RedisServer, Gateway]]:
    async with LocalProcesses(folder) as processes:
        server = await processes.start_redis(*arguments)
        session = {"redisUrl": server.url, "redisTimeoutSeconds": REDIS_TIMEOUT_SECONDS}
        gateway = await processes.start_gateway([engines[0]], [engines[1]], {"session": session})
        try:
            async with leaking_no_files(gateway, IDLE_CONNECTIONS), aiohttp.ClientSession() as http:
                yield Traffic(http, gateway), server, gateway
                await settled(gateway, *engines)
        finally:
            server.child.signal(signal.SIGCONT)


async def recovery(traffic: Traffic, gateway: Gateway) -> None:
    """Send turns until the gateway has reconnected to Redis."""
    probe = synthetic_sessions(1, 1, "probe")[0]

    async def recovered() -> bool:
        (record,) = await play(traffic.named, probe, [1])
        return record.verdict.state == "redis" and await gateway.metric("dps_state_degraded") == 0

    await wait_until(recovered, "the gateway uses Redis again")


def states(records: Iterable[TurnRecord]) -> set[str | None]:
    return {record.verdict.state for record in records}


def wrong(records: Iterable[TurnRecord]) -> list[TurnRecord]:
    """The turns whose decision differs from the oracle's."""
    return [record for record in records if decided(record) != EXPECTED[record.session][record.turn - 1]]


@pytest.mark.parametrize("fault", OUTAGES, ids=str)
async def test_outage_changes_no_decision_and_is_reported(
    fault: Fault, engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    newcomer = synthetic_sessions(1, 3, "newcomer")[0]
    async with running(tmp_path, engines, fault.arguments) as (traffic, server, gateway):
        assert states(await traffic.run(BEFORE)) == {"redis"}
        assert await gateway.metric("dps_state_degraded") == 0

        async with asyncio.TaskGroup() as under_traffic:
            under_traffic.create_task(traffic.run(DURING_FAULT))
            under_traffic.create_task(fault.inject(server))
        errors = await gateway.metric("dps_state_errors_total")
        without = await traffic.run(WITHOUT)
        first, second = await play(traffic.unnamed, newcomer, [1, 2])

        assert states(without) == {fault.state}
        assert (first.verdict.state, second.verdict.state) == {
            "redis": ("redis", "redis"),
            "mirror": ("none", "mirror"),
        }[fault.state]
        assert await gateway.metric("dps_state_degraded") == 1
        assert await status_of(f"{gateway.admin}/readyz") == 200
        assert await gateway.metric("dps_state_errors_total") > 0
        if fault.state == "mirror":
            # Each turn would call Redis twice, but the circuit breaker allows only occasional probes.
            assert await gateway.metric("dps_state_errors_total") - errors < len(without)

        async with asyncio.TaskGroup() as under_traffic:
            under_traffic.create_task(traffic.run(HEALED))
            under_traffic.create_task(fault.heal(server))
        await recovery(traffic, gateway)
        assert states(await traffic.run(AFTER)) == {"redis"}
        (third,) = await play(traffic.unnamed, newcomer, [3])

        assert wrong(traffic.records) == []
        assert [decided(record) for record in (first, second, third)] == expected([newcomer])[newcomer.id]
        assert await status_of(f"{gateway.admin}/readyz") == 200


@pytest.mark.parametrize("lose", [flush, restart_empty], ids=["flushed", "restarted-without-data"])
async def test_data_loss_affects_at_most_one_turn_per_session(
    lose: Step, engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with running(tmp_path, engines, ()) as (traffic, server, gateway):
        await traffic.run(BEFORE)
        async with asyncio.TaskGroup() as under_traffic:
            under_traffic.create_task(traffic.run(DURING_FAULT))
            under_traffic.create_task(lose(server))
        await traffic.run(WITHOUT)
        await traffic.run(HEALED)
        await recovery(traffic, gateway)
        after = await traffic.run(AFTER)

        assert states(after) == {"redis"}
        assert await status_of(f"{gateway.admin}/readyz") == 200
        for session in [*NAMED, *UNNAMED]:
            actual = [decided(record) for record in traffic.records if record.session == session.id]
            affected = [
                turn
                for turn, truth in zip(actual, EXPECTED[session.id], strict=True)
                if (turn.delta_tokens, turn.prompt_tokens) != (truth.delta_tokens, truth.prompt_tokens)
            ]
            assert len(affected) <= 1
            assert all(turn.delta_tokens == turn.prompt_tokens for turn in affected)
