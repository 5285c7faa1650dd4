"""The relation of a prompt to its session's history, and its ΔL."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.session.growth import Growth, History, compare
from dps_gateway.session.record import Point, Record

SPECULATIVE, GREEDY = frozenset({Pool.SPECULATIVE}), frozenset({Pool.GREEDY})


def point(turn: int, length: int | None = None, pools: frozenset[Pool] = GREEDY) -> Point:
    """The point of a turn whose prompt is 100 tokens longer than the previous one's."""
    length = 100 * turn if length is None else length
    return Point(turn, f"d{turn}", 4 * length, length - 3, length, pools)


def record(*points: Point) -> Record:
    result = Record(())
    for each in points:
        result = result.with_point(each)
    return result


HISTORY = record(point(1, pools=SPECULATIVE), point(2), point(3))

points = st.builds(
    Point,
    turn=st.integers(1, 12),
    digest=st.sampled_from("abcdefgh"),
    offset=st.integers(1, 4000),
    tokens=st.integers(0, 1000),
    counted=st.integers(1, 1000),
    pools=st.sets(st.sampled_from(Pool), min_size=1).map(frozenset),
    correction=st.integers(-50, 2000),
    conversation=st.sampled_from(["", "a"]),
)


def test_first_prompt_is_new_and_all_of_it_counts() -> None:
    growth = compare(None, lambda _: True)
    assert growth == Growth(History.NEW, None, {})
    assert growth.delta_tokens(250) == 250  # L_0 = 0


def test_prompt_that_extends_the_newest_point_has_grown() -> None:
    growth = compare(HISTORY, lambda _: True)
    assert growth.history is History.GROWN
    assert growth.delta_tokens(340) == 40
    assert growth.uncached_tokens(340, Pool.GREEDY) == 40
    assert growth.uncached_tokens(340, Pool.SPECULATIVE) == 240


def test_prompt_that_extends_an_older_point_has_branched() -> None:
    growth = compare(HISTORY, lambda p: p.turn <= 2)
    assert (growth.history, growth.delta_tokens(340)) == (History.BRANCHED, 140)


def test_prompt_that_extends_no_point_has_changed() -> None:
    growth = compare(HISTORY, lambda _: False)
    assert (growth.history, growth.delta_tokens(340)) == (History.CHANGED, 340)


def test_retry_has_zero_delta() -> None:
    assert compare(HISTORY, lambda _: True).delta_tokens(300) == 0


def test_longest_prefix_wins_even_if_a_shorter_one_is_newer() -> None:
    compacted = record(point(1), point(2, length=900), point(3, length=150))
    growth = compare(compacted, lambda p: p.turn == 2)
    assert (growth.history, growth.delta_tokens(1000)) == (History.BRANCHED, 100)


def test_prompt_that_extends_the_newest_point_of_an_older_conversation_has_grown() -> None:
    interleaved = Record(()).with_turn(point(1), None).with_turn(point(2, length=70), None)
    growth = compare(interleaved, lambda p: p.turn == 1)
    assert (growth.history, growth.delta_tokens(130)) == (History.GROWN, 30)


@given(st.lists(points, max_size=8), st.sets(st.sampled_from("abcdefgh")), st.integers(0, 2000))
def test_growth_is_between_zero_and_the_prompt_length(
    history: list[Point], prefixes: set[str], length: int
) -> None:
    non_negative = [p for p in history if p.length >= 0]
    growth = compare(record(*non_negative), lambda p: p.digest in prefixes)
    assert 0 <= growth.delta_tokens(length) <= length
    for pool in Pool:
        assert 0 <= growth.uncached_tokens(length, pool) <= length


@given(counted=st.integers(0, 5000), added=st.integers(0, 5000), correction=st.integers(-200, 5000))
def test_constant_correction_of_prompt_lengths_does_not_change_delta(
    counted: int, added: int, correction: int
) -> None:
    counted += 200
    base = replace(point(1, length=counted), correction=correction)
    growth = compare(record(base), lambda _: True)
    assert growth.delta_tokens(counted + added + base.correction) == added


@pytest.mark.parametrize(
    ("cached", "fetched"),
    [
        pytest.param(355, 0, id="a difference below SGLang's threshold is computed"),
        pytest.param(356, 256, id="a difference of the threshold is fetched"),
    ],
)
def test_pool_fetches_what_only_the_other_pool_has_cached(cached: int, fetched: int) -> None:
    growth = compare(record(point(1, 100, SPECULATIVE), point(2, cached, GREEDY)), lambda _: True)
    assert growth.fetchable_tokens(1000, Pool.SPECULATIVE) == fetched
    assert growth.fetchable_tokens(1000, Pool.GREEDY) == 0


@given(st.lists(points, max_size=12), st.integers(0, 3000), st.sampled_from(Pool))
def test_fetchable_tokens_are_a_part_of_the_uncached_ones(
    chosen: list[Point], prompt: int, pool: Pool
) -> None:
    growth = compare(record(*chosen), lambda _: True)
    assert 0 <= growth.fetchable_tokens(prompt, pool) <= growth.uncached_tokens(prompt, pool)
