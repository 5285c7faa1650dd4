"""The admin port: the entries that a peer may write to the mirror, and the token that protects sessions."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_gateway.api.admin import admin_app, redacted, worker_app
from dps_gateway.api.admin_auth import is_local
from dps_gateway.config import GatewayConfig, Listen
from dps_gateway.pool import Pool
from dps_gateway.runtime import Runtime
from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.keys import MAX_VALUE_BYTES, Pointer, pointer_key, record_key
from dps_gateway.session.peer_signature import SignedRequest
from dps_gateway.session.peers import PATH
from dps_gateway.session.record import Holder, Point, Record
from dps_gateway.telemetry.json_log import JsonLog
from dps_testkit.tokenizers import shared_tokenizer

SCOPE = Scope.of("m", "")
SESSION = SessionId.of_client(SCOPE, "s")
POINT = Point(1, "d" * 22, 10, 5, 7, (Holder(Pool.GREEDY, "aaaa"),))
RECORD_KEY = record_key(SCOPE, SESSION)
RECORD = Record((POINT,)).encode().decode()
POINTER_KEY = pointer_key(SCOPE, SESSION.tag, POINT.digest)
POINTER = Pointer(SESSION, POINT).encode().decode()


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    pool = {"endpoints": ["http://127.0.0.1:1"]}
    config = {"model": {"name": "m", "tokenizer": "x"}, "pools": {"speculative": pool, "greedy": pool}}
    runtime = Runtime(GatewayConfig.model_validate(config), shared_tokenizer())
    yield runtime
    await runtime.close()


async def put(runtime: Runtime, body: str) -> int:
    async with (
        TestServer(admin_app(runtime)) as server,
        aiohttp.ClientSession() as client,
        client.put(server.make_url("/mirror"), data=body) as response,
    ):
        return response.status


async def test_records_and_pointers_of_this_gateway_are_accepted(runtime: Runtime) -> None:
    assert await put(runtime, json.dumps({RECORD_KEY: RECORD, POINTER_KEY: POINTER})) == 204
    assert runtime.mirror.get(RECORD_KEY) == RECORD.encode()
    assert runtime.mirror.get(POINTER_KEY) == POINTER.encode()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("billing:balance", "0", id="foreign key"),
        pytest.param("billing:balance", RECORD, id="foreign key, record"),
        pytest.param(f"x{RECORD_KEY}", RECORD, id="prefixed key"),
        pytest.param(f"{RECORD_KEY}x", RECORD, id="suffixed key"),
        pytest.param(record_key(Scope.of("other", ""), SESSION), RECORD, id="other model"),
        pytest.param(record_key(Scope.of("m", "unknown"), SESSION), RECORD, id="unknown tenant"),
        pytest.param(RECORD_KEY.replace(SESSION.tag, "0" * 8, 1), RECORD, id="hash tag of another session"),
        pytest.param(RECORD_KEY, "not a record", id="not a record"),
        pytest.param(RECORD_KEY, POINTER, id="pointer as record"),
        pytest.param(POINTER_KEY, RECORD, id="record as pointer"),
        pytest.param(RECORD_KEY, RECORD + " " * MAX_VALUE_BYTES, id="oversized"),
    ],
)
async def test_other_entries_are_refused(runtime: Runtime, key: str, value: str) -> None:
    assert await put(runtime, json.dumps({RECORD_KEY: RECORD, key: value})) == 400
    assert (runtime.mirror.get(key), len(runtime.mirror)) == (None, 0)


async def test_oversized_body_is_refused(runtime: Runtime) -> None:
    assert await put(runtime, json.dumps({RECORD_KEY: RECORD + " " * 900_000})) == 413
    assert len(runtime.mirror) == 0


OF_OPERATORS = [("GET", "/decisions"), ("GET", "/sessions/s"), ("DELETE", "/sessions/s")]
OF_PEERS = [("POST", "/mirror"), ("PUT", "/mirror"), ("DELETE", "/mirror")]
PROTECTED = [*OF_OPERATORS, *OF_PEERS]
OPEN = [("GET", path) for path in ("/livez", "/metrics", "/pools", "/config")]


@pytest.mark.parametrize("sent", [{}, {"Authorization": "Bearer other"}, {"Authorization": "Basic token"}])
async def test_sessions_are_protected_by_the_token(runtime: Runtime, sent: dict[str, str]) -> None:
    runtime.admin_token = "token"
    async with TestServer(admin_app(runtime)) as server, aiohttp.ClientSession() as client:

        async def status(method: str, path: str, headers: dict[str, str]) -> int:
            async with client.request(method, server.make_url(path), headers=headers, data=b"[]") as response:
                return response.status

        assert {await status(*each, sent) for each in PROTECTED} == {401}
        assert {await status(*each, sent) for each in OPEN} == {200}
        with_token = {"Authorization": "Bearer token"}
        assert [await status(*each, with_token) for each in OF_OPERATORS] == [404, 404, 404]
        assert {await status(*each, with_token) for each in OF_PEERS} == {401}


async def test_peer_must_sign_the_whole_request_with_the_token(runtime: Runtime) -> None:
    runtime.admin_token = "token"
    body = json.dumps({RECORD_KEY: RECORD}).encode()
    signed = {"Authorization": SignedRequest.of("token", "PUT", PATH, body).authorization}
    async with TestServer(admin_app(runtime)) as server, aiohttp.ClientSession() as client:

        async def status(method: str, data: bytes, headers: dict[str, str]) -> int:
            async with client.request(method, server.make_url(PATH), headers=headers, data=data) as response:
                return response.status

        assert await status("DELETE", body, signed) == 401
        assert await status("PUT", body + b" ", signed) == 401
        for authorization in (
            "DPS-Peer",
            "DPS-Peer a",
            "DPS-Peer a b c",
            "DPS-Peer a b c d",
            "DPS-Peer a \xe9",
        ):
            assert await status("PUT", body, {"Authorization": authorization}) == 401
        assert len(runtime.mirror) == 0
        assert await status("PUT", body, signed) == 204
        assert runtime.mirror.get(RECORD_KEY) == RECORD.encode()


async def test_unsigned_request_is_refused_before_its_body_arrives(runtime: Runtime) -> None:
    runtime.admin_token = "token"
    signed = SignedRequest.of("other", "PUT", PATH, b"[]").authorization
    async with TestServer(admin_app(runtime)) as server:
        for header in ("", f"Authorization: {signed}\r\n"):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(f"PUT {PATH} HTTP/1.1\r\nHost: x\r\n{header}Content-Length: 2\r\n\r\n".encode())
            async with asyncio.timeout(5):
                assert b" 401 " in await reader.readline()
            writer.close()


def own_address() -> str:
    """An address of this host other than loopback. Skips the test if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address other than loopback")
        return str(probe.getsockname()[0])


async def test_without_a_token_other_hosts_cannot_access_sessions(runtime: Runtime) -> None:
    # A request to the host's own address has that address as its source.
    async with (
        TestServer(admin_app(runtime), host=own_address()) as server,
        aiohttp.ClientSession() as client,
    ):
        statuses = set()
        for method, path in PROTECTED:
            async with client.request(method, server.make_url(path), data=b"[]") as response:
                statuses.add(response.status)
    assert statuses == {401}


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("127.0.0.6", False),
        ("10.0.0.1", False),
        (None, False),
    ],
)
def test_forwarded_requests_do_not_count_as_local(address: str | None, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("listen", "environment", "address"),
    [
        pytest.param({}, {}, "127.0.0.1", id="outside a cluster"),
        pytest.param({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "0.0.0.0", id="in a pod"),
        pytest.param({"adminHost": "10.1.2.3"}, {}, "10.1.2.3", id="configured"),
    ],
)
def test_address_of_the_admin_port(listen: dict[str, str], environment: dict[str, str], address: str) -> None:
    assert Listen.model_validate(listen).admin_address(environment) == address


async def decisions(runtime: Runtime) -> tuple[int, str]:
    async with (
        TestServer(admin_app(runtime)) as server,
        aiohttp.ClientSession() as client,
        client.get(server.make_url("/decisions")) as response,
    ):
        return response.status, await response.text()


async def test_the_decision_log_is_served(runtime: Runtime, tmp_path: Path) -> None:
    runtime.decision_log = JsonLog(tmp_path / "decisions.jsonl")
    assert await decisions(runtime) == (200, "")
    runtime.decision_log.add({"turn": 1})
    assert await decisions(runtime) == (200, '{"turn":1}\n')


async def test_a_decision_log_that_is_off_or_cannot_be_read_is_an_error(
    runtime: Runtime, tmp_path: Path
) -> None:
    status, text = await decisions(runtime)
    assert (status, "set routing.decisionLog" in text) == (404, True)
    runtime.decision_log = JsonLog(tmp_path / "missing" / "decisions.jsonl")
    status, text = await decisions(runtime)
    assert (status, "No such file or directory" in text) == (503, True)


async def test_peers_use_the_token_that_is_in_its_file_at_present(runtime: Runtime, tmp_path: Path) -> None:
    runtime.admin_token = "token"
    file = tmp_path / "token"
    file.write_text("old")
    async with TestServer(admin_app(runtime)) as server:
        config = runtime.config.model_dump(by_alias=True, exclude_none=True)
        config["listen"] = {"adminTokenFile": file}
        config["session"] = {"peers": {"endpoints": [str(server.make_url("")).rstrip("/")]}}
        peer = Runtime(GatewayConfig.model_validate(config), shared_tokenizer())
        assert peer.peers is not None
        for token, known in (("old", [{}]), ("token", [{RECORD_KEY: RECORD.encode()}])):
            file.write_text(token)
            peer.apply(peer.config)
            await peer.peers.publish({RECORD_KEY: RECORD.encode()})
            assert await peer.peers.values([RECORD_KEY]) == known
        await peer.peers.forget([RECORD_KEY])
        assert await peer.peers.values([RECORD_KEY]) == [{}]
        await peer.close()


async def test_workers_of_one_replica_answer_for_each_other(runtime: Runtime, tmp_path: Path) -> None:
    """Each worker has a socket; the admin port, which a worker picked by the kernel serves, answers for all."""
    worker, sibling = (Runtime(runtime.config, shared_tokenizer(), tmp_path / f"{n}.sock") for n in (1, 2))
    runner = web.AppRunner(worker_app(sibling))
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "2.sock")).start()
    (tmp_path / "3.sock").touch()  # of a worker that has died
    assert await put(worker, json.dumps({RECORD_KEY: RECORD})) == 204
    assert sibling.mirror.get(RECORD_KEY) == RECORD.encode()
    sibling.mirror.put(POINTER_KEY, POINTER.encode(), None, 60, written=True)
    async with TestServer(admin_app(worker)) as server, aiohttp.ClientSession() as client:
        url = server.make_url("/mirror")
        async with client.post(url, json=[RECORD_KEY, POINTER_KEY]) as response:
            assert await response.json() == {RECORD_KEY: RECORD, POINTER_KEY: POINTER}
        async with client.delete(server.make_url(f"/sessions/{SESSION.text}")) as response:
            assert response.status == 200
        assert len(worker.mirror) == len(sibling.mirror) == 0
        await put(worker, json.dumps({RECORD_KEY: RECORD}))
        async with client.delete(url, json=[RECORD_KEY]) as response:
            assert response.status == 204
        assert len(worker.mirror) == len(sibling.mirror) == 0
    await runner.cleanup()
    await worker.close()
    await sibling.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://redis:6379/0", "redis://redis:6379/0"),
        ("redis://user:secret@redis/0", "redis://user:***@redis/0"),
        ("redis://redis/0?password=secret", "redis://redis/0?password=***"),
        (
            "redis+sentinel://:secret@a,b/0?service=main&sentinel_password=secret",
            "redis+sentinel://:***@a,b/0?service=***&sentinel_password=***",
        ),
        (None, None),
    ],
)
def test_shown_redis_url_contains_no_password(url: str | None, shown: str | None) -> None:
    assert redacted(url) == shown
