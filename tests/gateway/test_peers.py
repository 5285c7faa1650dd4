"""What peers return is checked before it is used."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.keys import MAX_VALUE_BYTES, Pointer, is_valid_value, pointer_key, record_key
from dps_gateway.session.peer_signature import SIGNATURE, SignedRequest
from dps_gateway.session.peers import HttpPeers, WorkerPeers
from dps_gateway.session.record import FORMAT_VERSION, MAX_NUMBER, Holder, Point, Record
from dps_gateway.session.stored_responses import StoredResponse, response_key

SCOPE = Scope.of("model", "")
SESSION = SessionId.of_client(SCOPE, "s")
POINT = Point(1, "d" * 22, 10, 5, 7, (Holder(Pool.GREEDY, "aaaa"),))
RECORD = record_key(SCOPE, SESSION)
POINTER = pointer_key(SCOPE, SESSION.tag, POINT.digest)
RESPONSE = response_key(SCOPE, "resp")
VALUES = {
    RECORD: Record((POINT,)).encode(),
    POINTER: Pointer(SESSION, POINT).encode(),
    RESPONSE: StoredResponse(Pool.GREEDY, "http://a").encode(),
}
VALID = {key: value.decode() for key, value in VALUES.items()}
SECRET = "a secret"


class Peer:
    """Answers every request with `body`."""

    def __init__(self) -> None:
        self.body = b""
        self.status = 200
        self.headers: dict[str, str] = {}
        self.received: list[str] = []
        """The headers of the requests."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.received.append(str(request.headers))
        return web.Response(status=self.status, body=self.body, headers=self.headers)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    result = Peer()
    app = web.Application()
    app.router.add_route("*", "/mirror", result.handle)
    async with TestServer(app) as server:
        result.url = str(server.make_url("")).rstrip("/")
        yield result


def record(*fields: Any) -> str:
    return json.dumps([FORMAT_VERSION, "", "", [[*fields]]])


INVALID_ENTRIES: dict[str, Any] = {
    "not a record": VALID | {RECORD: SECRET},
    "a pointer as a record": VALID | {RECORD: VALID[POINTER]},
    "no string": VALID | {RECORD: [SECRET]},
    "an older format": VALID | {RECORD: VALID[RECORD].replace(str(FORMAT_VERSION), "1", 1)},
    "too long": VALID | {RECORD: VALID[RECORD] + " " * MAX_VALUE_BYTES},
    "a negative length": VALID | {RECORD: record(1, "d", -1, 1, 1, "gaaaa")},
    "a length that cannot be stored": VALID | {RECORD: record(1, "d", 1, 1, MAX_NUMBER + 1, "gaaaa")},
    "a key that was not requested": VALID | {RECORD.replace("dps-", "dps-0"): VALID[RECORD]},
}


@pytest.mark.parametrize("body", INVALID_ENTRIES.values(), ids=INVALID_ENTRIES.keys())
async def test_invalid_entry_is_ignored_counted_and_logged_without_its_content(
    peer: Peer, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[int] = []
    peers = HttpPeers(counted.append)
    peers.set_endpoints([peer.url])
    peer.body = json.dumps(body).encode()
    with caplog.at_level(logging.DEBUG, "dps_gateway"):
        (found,) = await peers.values(list(VALUES))
        await peers.values(list(VALUES))
    invalid = {key for key, value in body.items() if VALID.get(key) != value}
    assert found == {key: value for key, value in VALUES.items() if key not in invalid}
    assert counted == [1, 1]
    assert caplog.messages == [f"the peer {peer.url} returns session state that is not valid; it is ignored"]
    await peers.close()


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"<html>", b"\xff", b"null", json.dumps(VALID).encode() + b" " * 10**6],
    ids=["empty", "a list", "no JSON", "no UTF-8", "null", "too long"],
)
async def test_unreadable_answer_is_ignored_and_counted(peer: Peer, body: bytes) -> None:
    counted: list[int] = []
    peers = HttpPeers(counted.append)
    peers.set_endpoints([peer.url])
    peer.body = body
    assert await peers.values(list(VALUES)) == [{}]
    assert counted == [1]
    peer.status = 401
    assert await peers.values(list(VALUES)) == [{}]
    assert counted == [1]
    await peers.close()


async def test_valid_entries_are_used(peer: Peer) -> None:
    counted: list[int] = []
    peers = HttpPeers(counted.append)
    peers.set_endpoints([peer.url])
    peer.body = json.dumps(VALID).encode()
    assert await peers.values(list(VALUES)) == [VALUES]
    assert counted == []
    await peers.close()


async def test_process_at_the_address_of_a_peer_neither_receives_the_token_nor_can_forge_entries(
    peer: Peer,
) -> None:
    counted: list[int] = []
    peers = HttpPeers(counted.append)
    peers.set_endpoints([peer.url])
    peers.set_token("token")
    peer.body = json.dumps(VALID).encode()
    overheard = SignedRequest.of("token", "POST", "/mirror", json.dumps(list(VALUES)).encode())
    for signature in ({}, {SIGNATURE: "0" * 64}, {SIGNATURE: overheard.answer_signature(peer.body)}):
        peer.headers = signature
        assert await peers.values(list(VALUES)) == [{}]
    assert counted == [1, 1, 1]
    await peers.publish(VALUES)
    await peers.forget(list(VALUES))
    assert len(peer.received) == 5
    assert "token" not in "".join(peer.received)
    await peers.close()


@asynccontextmanager
async def listening(worker: Peer, *sockets: Path) -> AsyncIterator[None]:
    """Serve a worker's answers on several Unix sockets."""
    app = web.Application()
    app.router.add_post("/mirror", worker.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    for socket in sockets:
        await web.UnixSite(runner, str(socket)).start()
    yield
    await runner.cleanup()


async def test_entries_of_workers_are_checked(tmp_path: Path) -> None:
    worker = Peer()
    worker.body = json.dumps(VALID | {RECORD: SECRET}).encode()
    counted: list[int] = []
    workers = WorkerPeers(tmp_path / "1.sock", counted.append)
    async with listening(worker, tmp_path / "2.sock"):
        assert await workers.values(list(VALUES)) == [{key: VALUES[key] for key in (POINTER, RESPONSE)}]
        assert counted == [1]
        await workers.close()


async def test_workers_that_end_do_not_disturb_concurrent_queries(tmp_path: Path) -> None:
    worker = Peer()
    worker.body = json.dumps(VALID).encode()
    ending = [tmp_path / f"{number}.sock" for number in (2, 3, 4)]
    workers = WorkerPeers(tmp_path / "1.sock")

    async def end() -> None:
        for socket in ending:
            socket.unlink()

    async with listening(worker, *ending, tmp_path / "5.sock"):
        assert await workers.values(list(VALUES)) == [VALUES] * 4
        before = asyncio.create_task(workers.values(list(VALUES)))
        publishing = asyncio.create_task(workers.publish(VALUES))
        ended = asyncio.create_task(end())
        afterwards = [asyncio.create_task(workers.values(list(VALUES))) for _ in range(3)]
        assert sorted(await before, key=len) == [{}, {}, {}, VALUES]
        assert await asyncio.gather(*afterwards) == [[VALUES]] * 3
        await asyncio.gather(publishing, ended)
        await workers.close()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.just("gaaaa"),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)
records = st.tuples(
    st.just(FORMAT_VERSION), json_values, json_values, st.lists(st.lists(json_values, max_size=9))
)


@given(json_values | records)
def test_record_that_is_accepted_can_be_written_again(document: Any) -> None:
    value = json.dumps(document).encode()
    if is_valid_value(RECORD, value):
        accepted = Record.decode(value)
        assert Record.decode(accepted.encode()) == accepted
        assert accepted.merged(Record((POINT,))).points
