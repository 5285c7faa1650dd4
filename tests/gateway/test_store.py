"""Reading and committing session state while Redis is available, unavailable, full or empty."""

import asyncio

import pytest

from dps_gateway.pool import Pool
from dps_gateway.session.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Breaker
from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.mirror import Mirror
from dps_gateway.session.record import Holder, Point, Record
from dps_gateway.session.store import SessionStore, StateSource
from dps_testkit.session_backend import FakeBackend

SCOPE = Scope.of("model", "")
SESSION = SessionId.of_client(SCOPE, "session")


def point(turn: int, digest: str = "") -> Point:
    return Point(turn, digest or f"d{turn}", 100 * turn, 25 * turn, 25 * turn, (Holder(Pool.GREEDY, "aaaa"),))


class Gateway:
    """One gateway's store, and turns of one session committed through it."""

    def __init__(self, backend: FakeBackend | None, mirror_entries: int = 100) -> None:
        self.store = SessionStore(backend, Mirror(mirror_entries), ttl_seconds=60)

    async def turns(self) -> tuple[StateSource, list[int]]:
        snapshot = await self.store.read(SCOPE, SESSION)
        return snapshot.source, [p.turn for p in snapshot.record.points] if snapshot.record else []

    async def commit(self, turn: int, digest: str = "") -> None:
        snapshot = await self.store.read(SCOPE, SESSION)
        base = snapshot.record or Record(())
        await self.store.commit(
            SCOPE, snapshot, SESSION, base, point(turn, digest), next(iter(base.points), None)
        )


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


async def test_any_gateway_can_continue_a_session(backend: FakeBackend) -> None:
    await Gateway(backend).commit(1)
    await Gateway(backend).commit(2)
    assert await Gateway(backend).turns() == (StateSource.REDIS, [2, 1])


async def test_concurrent_turns_are_both_committed(backend: FakeBackend) -> None:
    one, two = Gateway(backend), Gateway(backend)
    await one.commit(1)
    seen_by_one = await one.store.read(SCOPE, SESSION)
    seen_by_two = await two.store.read(SCOPE, SESSION)
    for gateway, snapshot, digest in ((one, seen_by_one, "a"), (two, seen_by_two, "b")):
        await gateway.store.commit(SCOPE, snapshot, SESSION, Record(()), point(2, digest), None)
    snapshot = await one.store.read(SCOPE, SESSION)
    assert snapshot.record is not None
    assert [p.digest for p in snapshot.record.points] == ["a", "b", "d1"]


async def test_mirror_is_used_while_redis_is_unavailable(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    await gateway.commit(1)
    backend.unavailable = True
    assert await gateway.turns() == (StateSource.MIRROR, [1])
    await gateway.commit(2)
    assert await gateway.turns() == (StateSource.MIRROR, [2, 1])
    backend.unavailable = False
    assert await gateway.turns() == (StateSource.REDIS, [2, 1])
    await gateway.commit(3)
    assert await Gateway(backend).turns() == (StateSource.REDIS, [3, 2, 1])


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
    gateway, other = Gateway(backend), Gateway(backend)
    await gateway.commit(1)
    backend.unavailable = True
    await gateway.commit(2)
    assert await gateway.store.flush() == 0
    backend.unavailable = False
    assert await gateway.store.flush() == 1
    assert await other.turns() == (StateSource.REDIS, [2, 1])
    assert await gateway.store.flush() == 0


async def test_commit_made_during_an_outage_is_merged_with_newer_turns(backend: FakeBackend) -> None:
    gateway, other = Gateway(backend), Gateway(backend)
    await gateway.commit(1)
    backend.unavailable = True
    await gateway.commit(2)
    backend.unavailable = False
    await other.commit(3)
    await gateway.store.flush()
    assert await other.turns() == (StateSource.REDIS, [3, 2, 1])


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
    gateway.store.accept({"dps:{s:t}:s:foreign": b"1", "dps:{s:t}:p:valid": b"2"})
    backend.unavailable = False
    backend.foreign.add("dps:{s:t}:s:foreign")
    assert await gateway.store.flush() == 1
    assert backend.values == {"dps:{s:t}:p:valid": b"2"}
    assert "delete this key from Redis" in caplog.text
    assert await gateway.store.flush() == 0


async def test_session_is_unknown_to_another_gateway_while_redis_is_unavailable(backend: FakeBackend) -> None:
    await Gateway(backend).commit(1)
    backend.unavailable = True
    assert await Gateway(backend).turns() == (StateSource.NONE, [])


async def test_mirror_keeps_the_commits_that_a_full_redis_rejects(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    await gateway.commit(1)
    backend.full = True
    await gateway.commit(2)
    assert await gateway.turns() == (StateSource.REDIS, [2, 1])
    assert await Gateway(backend).turns() == (StateSource.REDIS, [1])


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


async def test_sessions_are_kept_in_memory_without_redis() -> None:
    gateway = Gateway(None)
    assert await gateway.turns() == (StateSource.MIRROR, [])
    await gateway.commit(1)
    assert await gateway.turns() == (StateSource.MIRROR, [1])


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


async def test_other_tenants_do_not_find_a_session(backend: FakeBackend) -> None:
    gateway = Gateway(backend)
    snapshot = await gateway.store.read(SCOPE, SESSION)
    new = point(1)
    await gateway.store.commit(SCOPE, snapshot, SESSION, Record(()), new, None, pointer_digest=new.digest)
    other = Scope.of("model", "other")
    assert (await gateway.store.find(other, SESSION.tag, ["d1"])).session is None


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


class TestMirrorEntries:
    def test_entry_expires_after_its_ttl(self) -> None:
        now = 0.0
        mirror = Mirror(10, clock=lambda: now)
        mirror.put("k", b"v", None, ttl_seconds=60, written=False)
        assert (mirror.get("k"), mirror.unwritten("k")) == (b"v", b"v")
        now = 61.0
        assert (mirror.get("k"), mirror.unwritten("k")) == (None, None)

    def test_putting_an_entry_again_marked_as_written_clears_its_unwritten_mark(self) -> None:
        mirror = Mirror(10)
        mirror.put("k", b"v", ("p", b"w"), 60, written=False)
        mirror.put("k", b"v", None, 60, written=True)
        assert (mirror.unwritten("k"), mirror.unwritten("p")) == (None, b"w")

    def test_unwritten_keys_are_found_without_a_scan_of_all_entries(self) -> None:
        now, reads = 0.0, 0

        def clock() -> float:
            nonlocal reads
            reads += 1
            return now

        mirror = Mirror(200, clock)
        for number in range(200):
            mirror.put(f"k{number}", b"v", None, ttl_seconds=60, written=number % 50 != 0)
        mirror.put("k0", b"w", None, ttl_seconds=60, written=False)
        reads = 0
        assert mirror.unwritten_keys(limit=3) == ["k50", "k100", "k150"]
        assert mirror.unwritten_keys(limit=10) == ["k50", "k100", "k150", "k0"]
        assert reads == 7
        now = 61.0
        assert mirror.unwritten_keys(limit=10) == []
        reads = 0
        assert (mirror.unwritten_keys(limit=10), reads) == ([], 0)

    def test_unwritten_entry_that_is_removed_is_no_longer_listed(self) -> None:
        mirror = Mirror(2)
        for key in ("a", "b", "c"):
            mirror.put(key, b"v", None, ttl_seconds=60, written=False)
        mirror.delete("b")
        assert mirror.unwritten_keys(limit=10) == ["c"]


class TestBreaker:
    def test_breaker_opens_after_consecutive_failures_and_allows_one_probe(self) -> None:
        now = 0.0
        breaker = Breaker(clock=lambda: now)
        for _ in range(FAILURES_TO_OPEN):
            assert breaker.allows()
            breaker.failed()
        assert (breaker.open, breaker.allows()) == (True, False)
        now = FIRST_PAUSE_SECONDS
        assert [breaker.allows(), breaker.allows()] == [True, False]
        breaker.succeeded()
        assert (breaker.open, breaker.allows()) == (False, True)

    def test_pause_between_probes_is_bounded(self) -> None:
        now = 0.0
        breaker = Breaker(clock=lambda: now)
        for _ in range(20):
            breaker.failed()
        now = LONGEST_PAUSE_SECONDS
        assert breaker.allows()

    def test_success_between_failures_keeps_the_breaker_closed(self) -> None:
        breaker = Breaker()
        for _ in range(10):
            breaker.failed()
            breaker.failed()
            breaker.succeeded()
        assert not breaker.open
