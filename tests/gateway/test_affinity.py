"""A session keeps its replica while others are added or removed, unless the replica is overloaded."""

from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import replica_id
from dps_gateway.upstream.affinity import LOAD_FACTOR, preferred, ranked
from dps_gateway.upstream.replica import Replica


def replicas(*loads: int) -> list[Replica]:
    replicas = [Replica(f"http://engine-{number}") for number in range(len(loads))]
    for replica, load in zip(replicas, loads, strict=True):
        replica.in_flight = load
    return replicas


sessions = st.text(min_size=1, max_size=20)
loads = st.lists(st.integers(0, 20), min_size=1, max_size=8)
held_tokens = st.dictionaries(
    st.integers(0, 7).map(lambda number: replica_id(f"http://engine-{number}")), st.integers(0, 9999)
)
"""Tokens of the session's prompt that some replicas hold."""


@given(sessions, st.integers(2, 8), st.integers(0, 7))
def test_removed_replica_moves_only_its_own_sessions(session: str, count: int, removed: int) -> None:
    pool = replicas(*[0] * count)
    order = ranked(session, pool)
    remaining = [replica for replica in pool if replica is not pool[removed % count]]
    assert ranked(session, remaining) == [replica for replica in order if replica in remaining]


def test_sessions_spread_evenly() -> None:
    pool = replicas(0, 0, 0, 0)
    chosen = [preferred(f"session-{number}", pool, lambda replica: 10) for number in range(4000)]
    shares = [sum(replica is each for replica in chosen) for each in pool]
    assert all(850 < share < 1150 for share in shares)


@given(sessions, loads, held_tokens)
def test_load_of_the_selected_replica_is_bounded(session: str, busy: list[int], held: dict[str, int]) -> None:
    pool = replicas(*busy)
    chosen = preferred(session, pool, lambda replica: 1000, held)
    assert chosen is not None
    bound = LOAD_FACTOR * (sum(busy) + 1) / len(busy) + 1
    assert chosen.in_flight < bound or chosen is ranked(session, pool, held)[0]


@given(sessions, loads, held_tokens)
def test_no_replica_below_the_bound_holds_more_than_the_selected_one(
    session: str, busy: list[int], held: dict[str, int]
) -> None:
    pool = replicas(*busy)
    chosen = preferred(session, pool, lambda replica: 1000, held)
    assert chosen is not None
    bound = LOAD_FACTOR * (sum(busy) + 1) / len(busy)
    better = [each for each in pool if held.get(each.id, 0) > held.get(chosen.id, 0)]
    assert all(each.in_flight >= bound for each in better)


@given(sessions, st.integers(1, 8), st.integers(0, 7), st.integers(1, 8))
def test_added_replicas_move_no_session_that_a_replica_holds(
    session: str, count: int, holder: int, added: int
) -> None:
    pool = replicas(*[0] * (count + added))
    kept = pool[holder % count]
    assert preferred(session, pool, lambda replica: 10, {kept.id: 1}) is kept


@given(loads)
def test_least_loaded_replica_is_selected_without_a_session(busy: list[int]) -> None:
    chosen = preferred(None, replicas(*busy), lambda replica: 1000)
    assert chosen is not None
    assert chosen.in_flight == min(busy)


@given(sessions, loads, held_tokens)
def test_full_replica_is_never_selected(session: str, busy: list[int], held: dict[str, int]) -> None:
    chosen = preferred(session, replicas(*busy), lambda replica: 10, held)
    assert (chosen is None) == all(load >= 10 for load in busy)
    assert chosen is None or chosen.in_flight < 10
