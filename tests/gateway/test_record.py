"""The session record: retention, storage, merging and correction of points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.acceptance import UNKNOWN
from dps_gateway.pool import Pool, replica_id
from dps_gateway.session.record import HOLDERS_PER_POOL, MAX_POINTS, RECENT_POINTS, CachedOn, Point, Record
from tests.gateway.session_records import GREEDY, SPECULATIVE, point, record

REPLICAS = [CachedOn(pool, replica_id(f"http://{pool}-{number}")) for pool in Pool for number in range(4)]


points = st.builds(
    Point,
    turn=st.integers(1, 12),
    digest=st.sampled_from("abcdefgh"),
    offset=st.integers(1, 4000),
    tokens=st.integers(0, 1000),
    counted=st.integers(1, 1000),
    holders=st.sampled_from(REPLICAS).map(lambda holder: (holder,)),
    correction=st.integers(-50, 50),
    conversation=st.sampled_from(["", "a", "b"]),
    shared=st.booleans(),
)
histories = st.lists(points, max_size=12)


class TestCommit:
    def test_prompt_that_several_replicas_answered_keeps_the_last_ones_of_each_pool(self) -> None:
        one, two, three = (CachedOn(Pool.GREEDY, replica_id(name)) for name in ("a", "b", "c"))
        repeated = record(*(point(1, holder=each) for each in (SPECULATIVE, one, two, three, two)))
        assert repeated.points == (point(1)._replace(holders=(two, three, SPECULATIVE)),)

    def test_newest_points_of_the_last_replicas_of_each_pool_are_kept(self) -> None:
        one, two, three = (CachedOn(Pool.GREEDY, replica_id(name)) for name in ("a", "b", "c"))
        holders = [SPECULATIVE, one, two, *[three] * 6]
        long = record(*(point(turn, holder=holder) for turn, holder in enumerate(holders, 1)))
        assert [p.turn for p in long.points] == [9, 8, 7, 6, 3, 1]

    def test_span_of_the_newest_turn_is_kept(self) -> None:
        traced = Record(()).with_point(point(2), "second").with_point(point(1), "first")
        assert traced.span == "second"

    @given(histories)
    def test_record_is_bounded_ordered_and_without_duplicates(self, history: list[Point]) -> None:
        result = record(*history)
        turns = [p.turn for p in result.points]
        conversations = {p.conversation for p in result.points}
        assert len(result.points) <= RECENT_POINTS + len(conversations) * len(Pool) * HOLDERS_PER_POOL
        assert turns == sorted(turns, reverse=True)
        assert len({p.digest for p in result.points}) == len(result.points)

    @given(histories, histories)
    def test_holders_of_a_point_are_bounded_and_without_duplicates(
        self, history: list[Point], other: list[Point]
    ) -> None:
        for each in record(*history).merged(record(*other)).points:
            assert len(set(each.holders)) == len(each.holders)
            for pool in Pool:
                assert sum(holder.pool is pool for holder in each.holders) <= HOLDERS_PER_POOL

    @given(histories, points)
    def test_replica_that_answered_last_holds_the_newest_prompt(
        self, history: list[Point], newest: Point
    ) -> None:
        newest = newest._replace(turn=13)
        assert record(*history, newest).points[0].holders[0] == newest.holders[0]

    @given(histories, points)
    def test_commit_is_idempotent(self, history: list[Point], again: Point) -> None:
        once = record(*history, again)
        assert once.with_point(again) == once

    @given(histories)
    def test_turn_number_never_decreases(self, history: list[Point]) -> None:
        result = Record(())
        for each in history:
            before, result = result.turn, result.with_point(each)
            assert result.turn >= max(before, each.turn)

    @given(histories, histories)
    def test_merge_keeps_the_higher_turn_number(self, one: list[Point], two: list[Point]) -> None:
        merged = record(*one).merged(record(*two))
        assert merged.turn == max(record(*one).turn, record(*two).turn)


class TestConversations:
    def test_turns_that_grow_from_one_another_are_one_conversation(self) -> None:
        grown = (
            Record(()).with_turn(point(1), None).with_turn(point(2), point(1)).with_turn(point(3), point(2))
        )
        assert {p.conversation for p in grown.points} == {""}
        assert grown.head("") == point(3)

    def test_second_of_two_concurrent_continuations_starts_a_conversation(self) -> None:
        """Both were measured while turn 1 was the newest point; the commits are applied one after the other."""
        first = Record(()).with_turn(point(1), None)
        both = first.with_turn(point(2, digest="left"), point(1)).with_turn(
            point(2, digest="right"), point(1)
        )
        assert [(p.digest, p.conversation) for p in both.points] == [
            ("left", ""),
            ("right", "right"),
            ("d1", ""),
        ]

    def test_retry_stays_in_its_conversation(self) -> None:
        first = Record(()).with_turn(point(1), None)
        assert first.with_turn(point(1), point(1)) == first
        assert first.with_turn(point(1), None) == first

    @given(order=st.lists(st.integers(0, 19), max_size=120))
    def test_newest_point_of_every_conversation_is_kept(self, order: list[int]) -> None:
        """Twenty sub-agents under one id take turns in any order."""
        state, heads = Record(()), dict[int, Point]()
        for turn, agent in enumerate(order, 1):
            parent = heads.get(agent)
            parent = parent and next(p for p in state.points if p.digest == parent.digest)
            committed = Point(turn, f"{agent:02}/{turn}", turn, turn, turn, (GREEDY,))
            state = state.with_turn(committed, parent)
            heads[agent] = committed
            digests = {p.digest for p in state.points}
            assert {head.digest for head in heads.values()} <= digests
        for head in heads.values():
            kept = next(p for p in state.points if p.digest == head.digest)
            assert state.head(kept.conversation) == kept

    def test_number_of_points_is_bounded(self) -> None:
        state = Record(())
        for turn in range(1, 3 * MAX_POINTS):
            state = state.with_turn(point(turn, digest=f"{turn:06}"), None)
        assert len(state.points) == MAX_POINTS
        assert len(state.encode()) < 6000

    def test_affinity_of_a_fork_survives_a_merge_and_a_commit(self) -> None:
        fork = Record((), affinity="origin")
        assert Record(()).merged(fork).affinity == fork.with_turn(point(1), None).affinity == "origin"

    def test_outline_is_that_of_the_newest_turn(self) -> None:
        state = Record(()).with_turn(point(2), None, outline="new").with_turn(point(1), None, outline="old")
        assert (
            state.outline
            == Record(()).with_turn(point(1), None, outline="old").merged(state).outline
            == "new"
        )
        assert state.corrected("d2", 7).outline == "new"


class TestStored:
    @given(histories, st.text(max_size=60), st.sampled_from(["", "dps-0"]))
    def test_record_survives_a_round_trip(self, history: list[Point], span: str, affinity: str) -> None:
        written = Record(record(*history).points, span, affinity, outline="abcd")
        assert Record.decode(written.encode()) == written

    def test_acceptance_takes_few_bytes_and_the_newest_survives_a_merge_and_a_commit(self) -> None:
        older = record(point(1))._replace(acceptance=UNKNOWN.observed(200, 100, 1))
        newer = older._replace(acceptance=older.acceptance.observed(90, 30, 2))
        kept = older.merged(newer).with_point(point(2))
        assert kept.acceptance == newer.acceptance == Record.decode(kept.encode()).acceptance
        assert len(newer.encode()) <= len(record(point(1)).encode()) + 12

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"{}",
            b"null",
            b"[1]",
            b"\xff",
            b'[4, "", "", "", [[1]]]',
            b'[4, "", "", "", [["x",1,1,1,1,""]]]',
            b'[4, "", "", "", [[1,"d",4,1,1,2]]]',
            b'[4, "", "", "", [[1,"d",4,1,1,["ggree"]]]]',
            b'[4, "", "", "", [[1,"d",4,1,1,"ggre"]]]',
            b'[4, "", "", "", [[1,"d",4,1,1,"xgree"]]]',
            pytest.param(b'[2, "", "", []]', id="an earlier version"),
            pytest.param(b'[4, "", "", []]', id="a later version"),
        ],
    )
    def test_invalid_record_is_rejected(self, raw: bytes) -> None:
        with pytest.raises(ValueError, match="not a session record"):
            Record.decode(raw)


class TestCorrection:
    def test_correction_survives_a_retry_and_a_merge(self) -> None:
        corrected = record(point(1)).corrected("d1", 93)
        assert corrected.with_point(point(1)) == corrected
        assert record(point(1)).merged(corrected).points[0].length == 93
