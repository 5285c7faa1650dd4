"""Where a response is stored survives an outage of Redis, and is separate for each tenant."""

from dataclasses import replace

import pytest

from dps_gateway.pool import Pool
from dps_gateway.session.identity import Scope
from dps_gateway.session.record import StoredResponse, response_key
from dps_gateway.session.store import Mirror, SessionStore
from tests.gateway.session_backend import FakeBackend

SCOPE, OTHER = Scope.of("model", "tenant"), Scope.of("model", "another")
STORED = StoredResponse(Pool.GREEDY, "http://10.0.0.1:30000", "dps-0123", "digest", 42)


def store(backend: FakeBackend | None) -> SessionStore:
    """The store of one gateway replica."""
    return SessionStore(backend, Mirror(100), 3600)


@pytest.mark.parametrize("backend", [FakeBackend(), None], ids=["Redis", "no Redis"])
async def test_response_is_known_to_its_tenant_only(backend: FakeBackend | None) -> None:
    replica = store(backend)
    await replica.remember(SCOPE, "resp_1", STORED)
    assert await replica.recall(SCOPE, "resp_1") == STORED
    assert await replica.recall(SCOPE, "resp_2") is None
    assert await replica.recall(OTHER, "resp_1") is None


async def test_response_is_known_to_other_replicas_once_redis_is_back() -> None:
    backend = FakeBackend()
    replica, another = store(backend), store(backend)
    backend.unavailable = True
    await replica.remember(SCOPE, "resp_1", STORED)
    assert await replica.recall(SCOPE, "resp_1") == STORED
    assert await another.recall(SCOPE, "resp_1") is None
    backend.unavailable = False
    assert await replica.flush() == 1
    assert await another.recall(SCOPE, "resp_1") == STORED


async def test_newer_record_of_a_response_replaces_the_earlier_one() -> None:
    backend = FakeBackend()
    replica, begun = store(backend), replace(STORED, tokens=0)
    await replica.remember(SCOPE, "resp_1", begun)
    await replica.remember(SCOPE, "resp_1", STORED)
    backend.unavailable = True
    await replica.remember(SCOPE, "resp_2", begun)
    backend.unavailable = False
    await replica.remember(SCOPE, "resp_2", STORED)
    assert await replica.flush() == 0
    for response_id in ("resp_1", "resp_2"):
        assert await replica.recall(SCOPE, response_id) == STORED
        assert await store(backend).recall(SCOPE, response_id) == STORED


def test_key_contains_no_response_id() -> None:
    key = response_key(SCOPE, "resp_secret")
    assert "secret" not in key


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b'["blue","u","s","d",1]', b'["greedy","u","s","d",[]]'])
def test_other_values_are_ignored(raw: bytes) -> None:
    assert StoredResponse.decode(raw) is None
