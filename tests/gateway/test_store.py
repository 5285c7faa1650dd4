"""Reading and committing session state while Redis is available, unavailable, full or empty."""

import asyncio

import pytest

from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.record import Record
from dps_gateway.session.redis import FAILURES_TO_OPEN, PAUSE_SECONDS, Breaker, StoreUnavailable
from dps_gateway.session.store import Mirror, SessionStore, StateSource
from tests.gateway.session_backend import FakeBackend
from tests.gateway.session_records import point

SCOPE = Scope.of("model", "")
SESSION = SessionId.of_client(SCOPE, "session")


class Gateway:
    """One gateway's store, and turns of one session committed through it."""

    def __init__(self, backend: FakeBackend | None, mirror_entries: int = 100) -> None:
        self.mirror = Mirror(mirror_entries)
        self.store = SessionStore(backend, self.mirror, ttl_seconds=60)

    async def turns(self) -> tuple[StateSource, list[int]]:
        snapshot = await self.store.read(SCOPE, SESSION)
        return snapshot.source, [p.turn for p in snapshot.record.points] if snapshot.record else []

    async def commit(self, turn: int, digest: str = "") -> None:
        snapshot = await self.store.read(SCOPE, SESSION)
        base = snapshot.record or Record(())
        await self.store.commit(
            SCOPE, snapshot, SESSION, base, point(turn, digest=digest), next(iter(base.points), None)
        )


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


async def test_commit_is_retried_after_one_timeout(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    await gateway.commit(1)
    backend.timeouts = 1
    await gateway.commit(2)
    assert await Gateway(backend).turns() == (StateSource.REDIS, [2, 1])
    assert await gateway.store.flush() == 0


async def test_commit_made_during_an_outage_is_written_when_redis_is_available_again(
    backend: FakeBackend,
) -> None:
    """It is merged with newer turns that others have committed meanwhile."""
    gateway, other = Gateway(backend), Gateway(backend)
    await gateway.commit(1)
    backend.unavailable = True
    await gateway.commit(2)
    assert await gateway.store.flush() == 0
    backend.unavailable = False
    await other.commit(3)
    assert await gateway.store.flush() == 1
    assert await other.turns() == (StateSource.REDIS, [3, 2, 1])
    assert await gateway.store.flush() == 0


async def test_late_write_of_a_turn_keeps_a_later_turn_that_is_not_written_yet(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    answered = asyncio.Event()
    backend.answered = answered
    slow = asyncio.create_task(gateway.commit(1))
    await asyncio.sleep(0)
    backend.answered, backend.full = None, True
    await gateway.commit(2)
    backend.full = False
    answered.set()
    await slow
    assert await gateway.turns() == (StateSource.REDIS, [2, 1])
    assert await gateway.store.flush() == 1
    assert await Gateway(backend).turns() == (StateSource.REDIS, [2, 1])
    assert await gateway.store.flush() == 0


async def test_foreign_value_does_not_block_the_commits_behind_it(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway(backend)
    backend.unavailable = True
    for key, value in (("dps:{s:t}:s:foreign", b"1"), ("dps:{s:t}:p:valid", b"2")):
        gateway.mirror.put(key, value, 600, written=False)
    backend.unavailable = False
    backend.foreign.add("dps:{s:t}:s:foreign")
    assert await gateway.store.flush() == 1
    assert backend.values == {"dps:{s:t}:p:valid": b"2"}
    assert "delete this key from Redis" in caplog.text
    assert await gateway.store.flush() == 0


async def test_record_is_restored_after_redis_lost_its_data(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    await gateway.commit(1)
    snapshot = await gateway.store.read(SCOPE, SESSION)
    backend.values.clear()
    assert snapshot.record is not None
    await gateway.store.commit(SCOPE, snapshot, SESSION, snapshot.record, point(2), snapshot.record.points[0])
    assert await Gateway(backend).turns() == (StateSource.REDIS, [2, 1])


async def test_unreadable_record_is_replaced(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    await gateway.commit(1)
    (key,) = backend.values
    backend.values[key] = b"rubbish"
    await gateway.commit(2)
    assert await Gateway(backend).turns() == (StateSource.REDIS, [2])


async def test_session_is_found_by_the_longest_committed_prefix(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    for turn in (1, 2):
        snapshot = await gateway.store.read(SCOPE, SESSION)
        new = point(turn)
        await gateway.store.commit(SCOPE, snapshot, SESSION, Record(()), new, None, pointer_digest=new.digest)
    for unavailable in (False, True):
        backend.unavailable = unavailable
        found = await gateway.store.find(SCOPE, SESSION.tag, ["unknown", "d2", "d1"])
        assert (found.session, found.point) == (SESSION, point(2))
        assert (await gateway.store.find(SCOPE, SESSION.tag, ["unknown"])).session is None


async def test_mirror_is_bounded() -> None:
    gateway = Gateway(None, mirror_entries=2)
    for number in range(5):
        session = SessionId.of_client(SCOPE, str(number))
        snapshot = await gateway.store.read(SCOPE, session)
        await gateway.store.commit(SCOPE, snapshot, session, Record(()), point(1), None)
    known = [await gateway.store.read(SCOPE, SessionId.of_client(SCOPE, str(number))) for number in range(5)]
    assert [snapshot.record is not None for snapshot in known] == [False, False, False, True, True]


async def test_deleted_session_is_gone_from_redis_and_mirror(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    await gateway.commit(1)
    assert await gateway.store.delete(SCOPE, SESSION)
    assert await gateway.turns() == (StateSource.REDIS, [])
    assert not await gateway.store.delete(SCOPE, SESSION)


async def test_deleted_session_is_not_written_again_after_an_outage(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    await gateway.commit(1)
    backend.unavailable = True
    await gateway.commit(2)
    with pytest.raises(StoreUnavailable):
        await gateway.store.delete(SCOPE, SESSION)
    backend.unavailable = False
    await gateway.store.delete(SCOPE, SESSION)
    assert await gateway.store.flush() == 0
    assert backend.values == {}


async def test_pointers_of_another_session_remain_when_its_fork_is_deleted(backend: FakeBackend) -> None:
    store, fork = Gateway(backend).store, SessionId.of_history(SESSION.tag, b"fork")
    snapshot = await store.read(SCOPE, SESSION)
    await store.commit(SCOPE, snapshot, SESSION, Record(()), point(1), None, pointer_digest="d1")
    snapshot = await store.read(SCOPE, fork)
    await store.commit(SCOPE, snapshot, fork, Record((point(1),)), point(2), point(1), pointer_digest="d2")
    assert await store.delete(SCOPE, fork)
    assert (await store.find(SCOPE, SESSION.tag, ["d2"])).session is None
    assert (await store.find(SCOPE, SESSION.tag, ["d2", "d1"])).session == SESSION


class TestMirrorEntries:
    def test_entry_expires_after_its_ttl(self) -> None:
        now = 0.0
        mirror = Mirror(10, clock=lambda: now)
        mirror.put("k", b"v", 60, written=False)
        assert (mirror.get("k"), mirror.unwritten("k")) == (b"v", b"v")
        now = 61.0
        assert (mirror.get("k"), mirror.unwritten("k")) == (None, None)


class TestBreaker:
    def test_breaker_opens_after_consecutive_failures_and_allows_one_probe(self) -> None:
        now = 0.0
        breaker = Breaker(clock=lambda: now)
        for _ in range(FAILURES_TO_OPEN):
            assert breaker.allows()
            breaker.failed()
        assert (breaker.open, breaker.allows()) == (True, False)
        now = PAUSE_SECONDS
        assert [breaker.allows(), breaker.allows()] == [True, False]
        breaker.succeeded()
        assert (breaker.open, breaker.allows()) == (False, True)

    def test_success_between_failures_keeps_the_breaker_closed(self) -> None:
        breaker = Breaker()
        for _ in range(10):
            breaker.failed()
            breaker.failed()
            breaker.succeeded()
        assert not breaker.open
