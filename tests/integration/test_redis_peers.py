"""During a Redis outage, sessions that move between two gateways keep their state, with and without session ids."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from dps_gateway.pool import Pool
from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.keys import Pointer, pointer_key
from dps_gateway.session.record import Holder, Point
from dps_lab.replay.client import Client, ReplayOptions
from dps_lab.replay.records import TurnRecord
from dps_local.processes import free_ports
from dps_local.stack import MODEL
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.sessions import decided, expected, play, synthetic_sessions
from dps_testkit.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

BEFORE, WITHOUT, HEALED = range(1, 4), range(4, 10), range(10, 16)
NAMED, UNNAMED = synthetic_sessions(3, HEALED[-1], "named"), synthetic_sessions(3, HEALED[-1], "unnamed")
EXPECTED = expected([*NAMED, *UNNAMED])


class AlternatingClients:
    """Clients that send each turn to the next gateway."""

    def __init__(self, http: aiohttp.ClientSession, gateways: Sequence[Gateway]) -> None:
        urls = [f"{gateway.url}/v1" for gateway in gateways]
        named = ReplayOptions(urls, MODEL, attempts=1)
        unnamed = replace(named, session_ids="none")
        self.clients = {session.id: Client(http, named) for session in NAMED}
        self.clients |= {session.id: Client(http, unnamed) for session in UNNAMED}

    async def run(self, turns: Sequence[int]) -> list[TurnRecord]:
        return [
            record
            for session in (*NAMED, *UNNAMED)
            for record in await play(self.clients[session.id], session, turns)
        ]


async def two_gateways(
    processes: LocalProcesses, engines: tuple[Engine, Engine], redis_url: str
) -> tuple[Gateway, Gateway]:
    ports = free_ports(2)
    peers = {"endpoints": [f"http://127.0.0.1:{port}" for port in ports]}
    session = {"redisUrl": redis_url, "redisTimeoutSeconds": 1, "peers": peers}
    first, second = [
        await processes.start_gateway([engines[0]], [engines[1]], {"session": session}, admin_port=port)
        for port in ports
    ]
    return first, second


async def test_gateways_use_each_others_mirrors_during_an_outage(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes, aiohttp.ClientSession() as http:
        redis = await processes.start_redis("--save", "3600 1")
        gateways = await two_gateways(processes, engines, redis.url)
        clients = AlternatingClients(http, gateways)
        records = await clients.run(BEFORE)
        await redis.child.stop()
        without = await clients.run(WITHOUT)
        redis.child.start()
        await redis.child.wait_ready()
        records += without + await clients.run(HEALED)

        async def healed() -> bool:
            return sum([await gateway.metric("dps_state_degraded") for gateway in gateways]) == 0

        await wait_until(healed, "both gateways have reconnected to Redis")

    assert {record.verdict.state for record in without} == {"mirror"}
    wrong = [record for record in records if decided(record) != EXPECTED[record.session][record.turn - 1]]
    assert wrong == []


async def test_mirror_returns_only_requested_keys_and_rejects_malformed_bodies(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes, aiohttp.ClientSession() as http:
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        scope = Scope.of(MODEL, "")
        session = SessionId.of_client(scope, "s")
        point = Point(1, "d" * 22, 10, 5, 7, (Holder(Pool.GREEDY, "aaaa"),))
        key, pointer = (
            pointer_key(scope, session.tag, point.digest),
            Pointer(session, point).encode().decode(),
        )

        async def post(body: bytes) -> tuple[int, object]:
            async with http.post(f"{gateway.admin}/mirror", data=body) as response:
                return response.status, await response.json()

        assert await post(b'["dps:{x:y}:s:z"]') == (200, {})
        async with http.put(f"{gateway.admin}/mirror", json={key: pointer}) as response:
            assert response.status == 204
        assert await post(json.dumps([key]).encode()) == (200, {key: pointer})
        for body in (b"{", b"[]", b'{"k": 1}'):
            async with http.put(f"{gateway.admin}/mirror", data=body) as response:
                assert response.status == 400
        refused = (400, {"error": "expected a JSON array of keys"})
        assert [await post(body) for body in (b"{", b"{}", b"[1]")] == [refused] * 3
