"""The session record: what is kept of a history, and how prompts are compared with it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.session.record import RECENT_POINTS, Growth, History, Point, Record, compare

SPECULATIVE, GREEDY = frozenset({Pool.SPECULATIVE}), frozenset({Pool.GREEDY})


def point(turn: int, length: int | None = None, pools: frozenset[Pool] = GREEDY, digest: str = "") -> Point:
    """The point of a turn whose prompt is 100 tokens longer than the one before."""
    length = 100 * turn if length is None else length
    return Point(turn, digest or f"d{turn}", 4 * length, length - 3, length, pools)


def record(*points: Point) -> Record:
    result = Record(())
    for each in points:
        result = result.with_point(each)
    return result


points = st.builds(
    Point,
    turn=st.integers(1, 12),
    digest=st.sampled_from("abcdefgh"),
    offset=st.integers(1, 4000),
    tokens=st.integers(0, 1000),
    length=st.integers(1, 1000),
    pools=st.sets(st.sampled_from(Pool), min_size=1).map(frozenset),
)


class TestCommit:
    def test_a_session_grows(self) -> None:
        assert record(point(1), point(2)).points == (point(2), point(1))

    def test_the_same_turn_again_is_one_point_that_both_pools_have_seen(self) -> None:
        again = record(point(1), point(2), point(2, pools=SPECULATIVE))
        assert again.points == (point(2, pools=SPECULATIVE | GREEDY), point(1))

    def test_a_slow_duplicate_of_an_older_turn_changes_nothing(self) -> None:
        grown = record(point(1), point(2), point(3))
        assert grown.with_point(point(2)) == grown

    def test_a_turn_that_is_long_forgotten_does_not_come_back(self) -> None:
        grown = record(*(point(turn) for turn in range(1, 10)))
        assert grown.with_point(point(2)) == grown

    def test_an_older_turn_decided_anew_becomes_the_newest(self) -> None:
        grown = record(point(1), point(2), point(3))
        assert grown.with_point(replace(point(2), turn=4)).points[0] == replace(point(2), turn=4)

    def test_concurrent_turns_of_one_session_are_both_kept(self) -> None:
        agents = record(point(1), point(2, digest="a"), point(2, digest="b"))
        assert [p.digest for p in agents.points] == ["a", "b", "d1"]

    def test_each_pool_keeps_the_newest_point_it_has_seen(self) -> None:
        long = record(point(1, pools=SPECULATIVE), *(point(turn) for turn in range(2, 10)))
        assert [p.turn for p in long.points] == [9, 8, 7, 6, 1]

    def test_the_newest_turns_span_is_kept(self) -> None:
        traced = Record(()).with_point(point(2), "second").with_point(point(1), "first")
        assert traced.span == "second"

    @given(st.lists(points, max_size=12))
    def test_a_record_is_small_ordered_and_without_repetition(self, history: list[Point]) -> None:
        result = record(*history)
        turns = [p.turn for p in result.points]
        assert len(result.points) <= RECENT_POINTS + len(Pool)
        assert turns == sorted(turns, reverse=True)
        assert len({p.digest for p in result.points}) == len(result.points)

    @given(st.lists(points, max_size=12), points)
    def test_committing_twice_is_committing_once(self, history: list[Point], again: Point) -> None:
        once = record(*history, again)
        assert once.with_point(again) == once

    @given(st.lists(points, min_size=1, max_size=12))
    def test_the_turn_only_goes_forward(self, history: list[Point]) -> None:
        result = Record(())
        for each in history:
            before, result = result.turn, result.with_point(each)
            assert result.turn >= max(before, each.turn)

    @given(st.lists(points, max_size=8), st.lists(points, max_size=8))
    def test_two_halves_of_a_history_merge_to_the_later_turn(
        self, one: list[Point], two: list[Point]
    ) -> None:
        merged = record(*one).merged(record(*two))
        assert merged.turn == max(record(*one).turn, record(*two).turn)


class TestStored:
    @given(st.lists(points, max_size=8), st.text(max_size=60))
    def test_what_is_stored_is_read_back(self, history: list[Point], span: str) -> None:
        written = Record(record(*history).points, span)
        assert Record.decode(written.encode()) == written

    def test_it_is_small(self) -> None:
        digest = "x" * 22
        full = record(*(point(turn, 30_000 + turn, digest=f"{digest}{turn}") for turn in range(1, 9)))
        assert len(full.encode()) < 300

    @pytest.mark.parametrize(
        "raw", [b"", b"{}", b"null", b"[1]", b'["", [[1]]]', b'["", [["x",1,1,1,1,1]]]', b"\xff"]
    )
    def test_anything_else_is_refused(self, raw: bytes) -> None:
        with pytest.raises(ValueError, match="not a session record"):
            Record.decode(raw)


class TestCompare:
    HISTORY = record(point(1, pools=SPECULATIVE), point(2), point(3))

    def test_no_record_is_a_new_session(self) -> None:
        growth = compare(None, lambda _: True)
        assert growth == Growth(History.NEW, None, {})
        assert growth.delta_tokens(250) == 250  # L_0 = 0

    def test_the_newest_point_is_a_prefix(self) -> None:
        growth = compare(self.HISTORY, lambda _: True)
        assert growth.history is History.GROWN
        assert growth.delta_tokens(340) == 40
        assert growth.uncached_tokens(340, Pool.GREEDY) == 40
        assert growth.uncached_tokens(340, Pool.SPECULATIVE) == 240

    def test_an_older_point_is_the_longest_prefix(self) -> None:
        growth = compare(self.HISTORY, lambda p: p.turn <= 2)
        assert (growth.history, growth.delta_tokens(340)) == (History.BRANCHED, 140)

    def test_no_point_is_a_prefix(self) -> None:
        growth = compare(self.HISTORY, lambda _: False)
        assert (growth.history, growth.delta_tokens(340)) == (History.CHANGED, 340)

    def test_a_retry_adds_nothing(self) -> None:
        assert compare(self.HISTORY, lambda _: True).delta_tokens(300) == 0

    def test_the_longest_prefix_counts_even_if_a_shorter_one_is_newer(self) -> None:
        compacted = record(point(1), point(2, length=900), point(3, length=150))
        growth = compare(compacted, lambda p: p.turn == 2)
        assert (growth.history, growth.delta_tokens(1000)) == (History.BRANCHED, 100)

    @given(st.lists(points, max_size=8), st.sets(st.sampled_from("abcdefgh")), st.integers(0, 2000))
    def test_growth_is_never_negative_and_never_more_than_the_prompt(
        self, history: list[Point], prefixes: set[str], length: int
    ) -> None:
        growth = compare(record(*history), lambda p: p.digest in prefixes)
        assert 0 <= growth.delta_tokens(length) <= length
        for pool in Pool:
            assert 0 <= growth.uncached_tokens(length, pool) <= length


class TestCorrection:
    def test_the_engines_length_takes_the_place_of_ours(self) -> None:
        corrected = record(point(1), point(2)).with_length("d2", 207)
        assert [p.length for p in corrected.points] == [207, 100]

    def test_an_evicted_pool_holds_only_what_it_has_just_answered(self) -> None:
        corrected = record(point(1), point(2), point(3)).without_cache(Pool.GREEDY, keep="d3")
        assert [p.pools for p in corrected.points] == [GREEDY, frozenset(), frozenset()]
