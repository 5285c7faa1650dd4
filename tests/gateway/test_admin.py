"""The admin port: the entries that a peer may write to the mirror."""

import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from dps_gateway.api.admin import admin_app
from dps_gateway.config import GatewayConfig
from dps_gateway.pool import Pool
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.runtime import Runtime
from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.keys import MAX_VALUE_BYTES, Pointer, pointer_key, record_key
from dps_gateway.session.record import Point, Record
from dps_local.assets import bundled_tokenizer

SCOPE = Scope.of("m", "")
SESSION = SessionId.of_client(SCOPE, "s")
POINT = Point(1, "d" * 22, 10, 5, 7, frozenset({Pool.GREEDY}))
RECORD_KEY = record_key(SCOPE, SESSION)
RECORD = Record((POINT,)).encode().decode()
POINTER_KEY = pointer_key(SCOPE, SESSION.tag, POINT.digest)
POINTER = Pointer(SESSION, POINT).encode().decode()


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    pool = {"endpoints": ["http://127.0.0.1:1"]}
    config = {"model": {"name": "m", "tokenizer": "x"}, "pools": {"speculative": pool, "greedy": pool}}
    runtime = Runtime(GatewayConfig.model_validate(config), Tokenizer.load(str(bundled_tokenizer())))
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
