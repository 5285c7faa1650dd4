"""A session keeps its replica while others are added or removed, unless the replica is overloaded."""

from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import replica_id
from dps_gateway.upstream.engine_pool import LOAD_FACTOR
from tests.gateway.engine_pool import SinglePool


def pool_with(*loads: int, slots: int = 1000) -> SinglePool:
    """A pool whose replicas have these numbers of requests."""
    pool = SinglePool(*(f"http://engine-{number}" for number in range(len(loads))), slots=slots)
    for replica, load in zip(pool.replicas.values(), loads, strict=True):
        replica.in_flight = load
    return pool


sessions = st.text(min_size=1, max_size=20)
loads = st.lists(st.integers(0, 20), min_size=1, max_size=8)
held_tokens = st.dictionaries(
    st.integers(0, 7).map(lambda number: replica_id(f"http://engine-{number}")), st.integers(0, 9999)
)
"""Tokens of the session's prompt that some replicas hold."""


@given(sessions, st.integers(2, 8), st.integers(0, 7))
def test_removed_replica_moves_only_its_own_sessions(session: str, count: int, removed: int) -> None:
    pool = pool_with(*[0] * count)
    before = pool.choose(session)
    urls = list(pool.replicas)
    del urls[removed % count]
    pool.set_endpoints(urls)
    after = pool.choose(session)
    assert before is not None
    assert after is before or before.url not in urls


def test_sessions_spread_evenly() -> None:
    pool = pool_with(0, 0, 0, 0)
    chosen = [pool.choose(f"session-{number}") for number in range(4000)]
    shares = [sum(replica is each for replica in chosen) for each in pool.replicas.values()]
    assert all(850 < share < 1150 for share in shares)


@given(sessions, loads, held_tokens)
def test_load_of_the_selected_replica_is_bounded(session: str, busy: list[int], held: dict[str, int]) -> None:
    chosen = pool_with(*busy).choose(session, held)
    first_choice = pool_with(*[0] * len(busy)).choose(session, held)
    assert chosen is not None
    assert first_choice is not None
    bound = LOAD_FACTOR * (sum(busy) + 1) / len(busy) + 1
    assert chosen.in_flight < bound or chosen.url == first_choice.url


@given(sessions, loads, held_tokens)
def test_no_replica_below_the_bound_holds_more_than_the_selected_one(
    session: str, busy: list[int], held: dict[str, int]
) -> None:
    pool = pool_with(*busy)
    chosen = pool.choose(session, held)
    assert chosen is not None
    bound = LOAD_FACTOR * (sum(busy) + 1) / len(busy)
    better = [each for each in pool.ready if held.get(each.id, 0) > held.get(chosen.id, 0)]
    assert all(each.in_flight >= bound for each in better)


@given(sessions, st.integers(1, 8), st.integers(0, 7), st.integers(1, 8))
def test_added_replicas_move_no_session_that_a_replica_holds(
    session: str, count: int, holder: int, added: int
) -> None:
    pool = pool_with(*[0] * (count + added))
    kept = pool.ready[holder % count]
    assert pool.choose(session, {kept.id: 1}) is kept


@given(loads)
def test_least_loaded_replica_is_selected_without_a_session(busy: list[int]) -> None:
    chosen = pool_with(*busy).choose(None)
    assert chosen is not None
    assert chosen.in_flight == min(busy)


@given(sessions, loads, held_tokens)
def test_full_replica_is_never_selected(session: str, busy: list[int], held: dict[str, int]) -> None:
    chosen = pool_with(*busy, slots=10).choose(session, held)
    assert (chosen is None) == all(load >= 10 for load in busy)
    assert chosen is None or chosen.in_flight < 10
