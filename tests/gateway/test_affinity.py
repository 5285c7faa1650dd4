"""A session keeps its replica while others are added or removed, unless the replica is overloaded."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.upstream.affinity import LOAD_FACTOR, preferred, ranked


@dataclass
class FakeReplica:
    url: str
    in_flight: int = 0


def replicas(*loads: int) -> list[FakeReplica]:
    return [FakeReplica(f"http://engine-{number}", load) for number, load in enumerate(loads)]


sessions = st.text(min_size=1, max_size=20)
loads = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(sessions, st.integers(1, 8))
def test_session_keeps_its_replica(session: str, count: int) -> None:
    pool = replicas(*[0] * count)
    first = preferred(session, pool, max_in_flight=10)
    assert first is preferred(session, list(reversed(pool)), max_in_flight=10)


@given(sessions, st.integers(2, 8), st.integers(0, 7))
def test_removed_replica_moves_only_its_own_sessions(session: str, count: int, removed: int) -> None:
    pool = replicas(*[0] * count)
    order = ranked(session, pool)
    remaining = [replica for replica in pool if replica is not pool[removed % count]]
    assert ranked(session, remaining) == [replica for replica in order if replica in remaining]


def test_sessions_spread_evenly() -> None:
    pool = replicas(0, 0, 0, 0)
    chosen = [preferred(f"session-{number}", pool, 10) for number in range(4000)]
    shares = [sum(replica is each for replica in chosen) for each in pool]
    assert all(850 < share < 1150 for share in shares)


@given(sessions, loads)
def test_load_of_the_selected_replica_is_bounded(session: str, busy: list[int]) -> None:
    pool = replicas(*busy)
    chosen = preferred(session, pool, max_in_flight=1000)
    assert chosen is not None
    bound = LOAD_FACTOR * (sum(busy) + 1) / len(busy) + 1
    assert chosen.in_flight < bound or chosen is ranked(session, pool)[0]


@given(loads)
def test_least_loaded_replica_is_selected_without_a_session(busy: list[int]) -> None:
    chosen = preferred(None, replicas(*busy), max_in_flight=1000)
    assert chosen is not None
    assert chosen.in_flight == min(busy)


@given(sessions, loads)
def test_full_replica_is_never_selected(session: str, busy: list[int]) -> None:
    chosen = preferred(session, replicas(*busy), max_in_flight=10)
    assert (chosen is None) == all(load >= 10 for load in busy)
    assert chosen is None or chosen.in_flight < 10
