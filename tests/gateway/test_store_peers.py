"""Session state is exchanged between gateways while Redis is unavailable."""

from collections.abc import Sequence

import pytest

from dps_gateway.pool import Pool
from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.mirror import Mirror
from dps_gateway.session.record import Holder, Point, Record
from dps_gateway.session.storage import StoreUnavailable
from dps_gateway.session.store import SessionStore, StateSource
from dps_testkit.session_backend import FakeBackend

SCOPE = Scope.of("model", "")
SESSION = SessionId.of_client(SCOPE, "session")


class Gateways:
    """Gateways that share one Redis and are each other's peers."""

    def __init__(self, gateways: int = 2) -> None:
        self.backends = [FakeBackend() for _ in range(gateways)]
        for backend in self.backends:
            backend.values = self.backends[0].values
        self.calls = 0
        self.mirrors = [Mirror(100) for _ in range(gateways)]
        self.stores = [
            SessionStore(backend, mirror, 600, self)
            for backend, mirror in zip(self.backends, self.mirrors, strict=True)
        ]

    def set_unavailable(self, unavailable: bool) -> None:
        """Make Redis unavailable to all gateways, or available again."""
        for backend in self.backends:
            backend.unavailable = unavailable

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        self.calls += 1
        return [mirror.values(keys) for mirror in self.mirrors]

    async def publish(self, entries: dict[str, bytes]) -> None:
        self.calls += 1
        for store in self.stores:
            store.accept(entries)

    async def forget(self, keys: Sequence[str]) -> None:
        self.calls += 1
        for store in self.stores:
            store.forget(keys)

    async def commit(self, gateway: int, turn: int) -> None:
        """Commit a turn of the session through a gateway."""
        store = self.stores[gateway]
        snapshot = await store.read(SCOPE, SESSION)
        base = snapshot.record or Record(())
        parent = next(iter(base.points), None)
        await store.commit(
            SCOPE, snapshot, SESSION, base, point(turn), parent, pointer_digest=point(turn).digest
        )

    async def known(self, gateway: int) -> tuple[StateSource, list[int]]:
        """The source and the turns of the session's record as read by a gateway."""
        snapshot = await self.stores[gateway].read(SCOPE, SESSION)
        return snapshot.source, [p.turn for p in snapshot.record.points] if snapshot.record else []


def point(turn: int) -> Point:
    return Point(turn, f"d{turn}", 100 * turn, 25 * turn, 25 * turn, (Holder(Pool.GREEDY, "aaaa"),))


@pytest.fixture
def gateways() -> Gateways:
    return Gateways()


async def test_session_can_change_gateways_while_redis_is_unavailable(gateways: Gateways) -> None:
    await gateways.commit(0, 1)
    gateways.set_unavailable(True)
    for turn in (2, 3, 4):
        await gateways.commit(turn % 2, turn)
    assert await gateways.known(0) == (StateSource.MIRROR, [4, 3, 2, 1])
    assert await gateways.known(1) == (StateSource.MIRROR, [4, 3, 2, 1])


async def test_session_without_an_id_is_found_through_a_peer(gateways: Gateways) -> None:
    gateways.set_unavailable(True)
    await gateways.commit(0, 1)
    await gateways.commit(0, 2)
    found = await gateways.stores[1].find(SCOPE, SESSION.tag, ["d3", "d2", "d1"])
    assert (found.source, found.session, found.point) == (StateSource.MIRROR, SESSION, point(2))
    assert found.record is not None
    assert [known.turn for known in found.record.points] == [2, 1]


async def test_longest_history_of_all_gateways_is_used(gateways: Gateways) -> None:
    gateways.set_unavailable(True)
    await gateways.commit(1, 1)
    await gateways.commit(0, 2)
    found = await gateways.stores[1].find(SCOPE, SESSION.tag, ["d3", "d2", "d1"])
    assert found.point == point(2)


async def test_peer_writes_a_commit_if_redis_is_unreachable_from_one_gateway(gateways: Gateways) -> None:
    """Redis may be unreachable for one gateway only, because established connections outlive their Service."""
    await gateways.commit(1, 1)
    gateways.backends[0].unavailable = True
    await gateways.commit(0, 2)
    assert await gateways.known(1) == (StateSource.REDIS, [2, 1])
    found = await gateways.stores[1].find(SCOPE, SESSION.tag, ["d3", "d2", "d1"])
    assert (found.source, found.point) == (StateSource.REDIS, point(2))
    await gateways.commit(1, 3)
    await gateways.stores[1].flush()
    late = SessionStore(gateways.backends[1], Mirror(100), 600)
    snapshot = await late.read(SCOPE, SESSION)
    assert snapshot.record is not None
    assert [known.turn for known in snapshot.record.points] == [3, 2, 1]


async def test_commits_of_all_peers_during_an_outage_are_read_afterwards(gateways: Gateways) -> None:
    await gateways.commit(0, 1)
    gateways.set_unavailable(True)
    await gateways.commit(1, 2)
    await gateways.commit(0, 3)
    gateways.set_unavailable(False)
    assert await gateways.known(1) == (StateSource.REDIS, [3, 2, 1])


async def test_peers_are_not_queried_while_redis_is_available(gateways: Gateways) -> None:
    await gateways.commit(0, 1)
    await gateways.commit(1, 2)
    await gateways.stores[0].find(SCOPE, SESSION.tag, ["d3"])
    assert gateways.calls == 0


@pytest.mark.parametrize("outage", [False, True], ids=["all written", "some not written yet"])
async def test_deleted_session_is_unknown_to_all_gateways(gateways: Gateways, outage: bool) -> None:
    await gateways.commit(0, 1)
    gateways.set_unavailable(outage)
    await gateways.commit(1, 2)
    gateways.set_unavailable(False)
    assert await gateways.stores[0].delete(SCOPE, SESSION)
    assert gateways.backends[0].values == {}
    assert [await store.flush() for store in gateways.stores] == [0, 0]
    gateways.set_unavailable(True)
    for number, store in enumerate(gateways.stores):
        assert await gateways.known(number) == (StateSource.NONE, [])
        assert (await store.find(SCOPE, SESSION.tag, ["d2", "d1"])).session is None


async def test_pointers_of_another_session_remain_when_its_fork_is_deleted(gateways: Gateways) -> None:
    await gateways.commit(0, 1)
    store, fork = gateways.stores[0], SessionId.of_history(SESSION.tag, b"fork")
    snapshot = await store.read(SCOPE, fork)
    await store.commit(
        SCOPE, snapshot, fork, Record((point(1),)), point(2), point(1), pointer_digest=point(2).digest
    )
    assert await store.delete(SCOPE, fork)
    assert (await store.find(SCOPE, SESSION.tag, ["d2"])).session is None
    assert (await store.find(SCOPE, SESSION.tag, ["d2", "d1"])).session == SESSION


async def test_session_is_not_deleted_while_redis_is_unavailable(gateways: Gateways) -> None:
    await gateways.commit(0, 1)
    gateways.set_unavailable(True)
    with pytest.raises(StoreUnavailable):
        await gateways.stores[0].delete(SCOPE, SESSION)
    assert await gateways.known(0) == (StateSource.MIRROR, [1])


async def test_invalid_entries_of_a_peer_are_ignored(gateways: Gateways) -> None:
    gateways.set_unavailable(True)
    await gateways.commit(0, 1)
    (key,) = [key for key in gateways.mirrors[0].unwritten_keys(limit=10) if ":s:" in key]
    for mirror in gateways.mirrors:
        mirror.put(key, b"rubbish", None, 600, written=False)
    gateways.stores[1].accept({key: b"more of it"})
    assert await gateways.known(1) == (StateSource.NONE, [])
