"""Session state across replicas while Redis is away: each asks the others for what they have in mind."""

import pytest

from dps_gateway.pool import Pool
from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.mirror import Mirror
from dps_gateway.session.record import Point, Record
from dps_gateway.session.store import SessionStore, StateSource
from dps_testkit.session_backend import FakeBackend

SCOPE = Scope.of("model", "")
SESSION = SessionId.of_client(SCOPE, "session")


class Fleet:
    """Replicas before one Redis, which know each other."""

    def __init__(self, replicas: int = 2) -> None:
        self.redis = [FakeBackend() for _ in range(replicas)]
        for way in self.redis:
            way.values = self.redis[0].values
        self.asked = 0
        self.mirrors = [Mirror(100) for _ in range(replicas)]
        self.stores = [
            SessionStore(way, mirror, 600, self) for way, mirror in zip(self.redis, self.mirrors, strict=True)
        ]

    def away(self, away: bool) -> None:
        """Redis is away for everybody, or back."""
        for way in self.redis:
            way.away = away

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        self.asked += 1
        return [mirror.values(keys) for mirror in self.mirrors]

    async def publish(self, entries: dict[str, bytes]) -> None:
        self.asked += 1
        for store in self.stores:
            store.accept(entries)

    async def take(self, replica: int, turn: int) -> None:
        """A turn of the session at a replica."""
        store = self.stores[replica]
        snapshot = await store.read(SCOPE, SESSION)
        base = snapshot.record or Record(())
        await store.commit(
            SCOPE, snapshot, SESSION, base, point(turn), next(iter(base.points), None), pointed=True
        )

    async def known(self, replica: int) -> tuple[StateSource, list[int]]:
        """Where the replica finds the session, and the turns that it knows of it."""
        snapshot = await self.stores[replica].read(SCOPE, SESSION)
        return snapshot.source, [p.turn for p in snapshot.record.points] if snapshot.record else []


def point(turn: int) -> Point:
    return Point(turn, f"d{turn}", 100 * turn, 25 * turn, 25 * turn, frozenset({Pool.GREEDY}))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


async def test_a_session_that_changes_replicas_while_redis_is_away_is_remembered(fleet: Fleet) -> None:
    await fleet.take(0, 1)
    fleet.away(True)
    for turn in (2, 3, 4):
        await fleet.take(turn % 2, turn)
    assert await fleet.known(0) == (StateSource.MIRROR, [4, 3, 2, 1])
    assert await fleet.known(1) == (StateSource.MIRROR, [4, 3, 2, 1])


async def test_one_that_says_no_name_is_found_at_another_replica(fleet: Fleet) -> None:
    fleet.away(True)
    await fleet.take(0, 1)
    await fleet.take(0, 2)
    found = await fleet.stores[1].find(SCOPE, SESSION.tag, ["d3", "d2", "d1"])
    assert (found.source, found.session, found.point) == (StateSource.MIRROR, SESSION, point(2))
    assert found.record is not None
    assert [known.turn for known in found.record.points] == [2, 1]


async def test_the_longest_history_counts_wherever_it_is(fleet: Fleet) -> None:
    fleet.away(True)
    await fleet.take(1, 1)
    await fleet.take(0, 2)
    found = await fleet.stores[1].find(SCOPE, SESSION.tag, ["d3", "d2", "d1"])
    assert found.point == point(2)


async def test_what_one_replica_could_not_write_another_hands_in(fleet: Fleet) -> None:
    """A connection that is there outlives the Service it was made through: Redis may be away for one alone."""
    await fleet.take(1, 1)
    fleet.redis[0].away = True
    await fleet.take(0, 2)
    assert await fleet.known(1) == (StateSource.REDIS, [2, 1])
    found = await fleet.stores[1].find(SCOPE, SESSION.tag, ["d3", "d2", "d1"])
    assert (found.source, found.point) == (StateSource.REDIS, point(2))
    await fleet.take(1, 3)
    await fleet.stores[1].flush()
    late = SessionStore(fleet.redis[1], Mirror(100), 600)
    snapshot = await late.read(SCOPE, SESSION)
    assert snapshot.record is not None
    assert [known.turn for known in snapshot.record.points] == [3, 2, 1]


async def test_after_an_outage_each_knows_what_the_others_have_yet_to_write(fleet: Fleet) -> None:
    await fleet.take(0, 1)
    fleet.away(True)
    await fleet.take(1, 2)
    await fleet.take(0, 3)
    fleet.away(False)
    assert await fleet.known(1) == (StateSource.REDIS, [3, 2, 1])


async def test_nobody_is_asked_while_redis_answers(fleet: Fleet) -> None:
    await fleet.take(0, 1)
    await fleet.take(1, 2)
    await fleet.stores[0].find(SCOPE, SESSION.tag, ["d3"])
    assert fleet.asked == 0


async def test_rubbish_of_a_peer_is_as_good_as_nothing(fleet: Fleet) -> None:
    fleet.away(True)
    await fleet.take(0, 1)
    (key,) = [key for key in fleet.mirrors[0].unwritten_keys() if ":s:" in key]
    for mirror in fleet.mirrors:
        mirror.put(key, b"rubbish", None, 600, written=False)
    fleet.stores[1].accept({key: b"more of it"})
    assert await fleet.known(1) == (StateSource.NONE, [])
