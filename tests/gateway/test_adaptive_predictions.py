"""The latencies that the policy Adaptive predicts, and what it learns from answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.decision import Observation, PoolView
from dps_gateway.routing.learned import Workload
from tests.gateway.adaptive_turns import (
    FETCHABLE,
    IDLE,
    MOVED,
    answer,
    histories,
    learned,
    predicted,
    turn,
    views,
)


@given(history=histories, view=views, more=st.integers(0, 100), delta=st.integers(0, 5_000))
def test_predicted_latency_does_not_fall_with_the_load_or_the_tokens_to_prefill(
    history: list[Observation], view: PoolView, more: int, delta: int
) -> None:
    policy = learned(*history)
    view = replace(view, ready_replicas=1)
    low = predicted(policy, turn(view, view, delta_tokens=delta))
    for busier in (
        replace(view, in_flight=view.in_flight + more),
        replace(view, queued=view.queued + more),
        replace(view, queued_prefill_tokens=view.queued_prefill_tokens + 1_000 * more),
        replace(view, prompt=replace(view.prompt, prefill=view.prompt.prefill + 100 * more)),
    ):
        high = predicted(policy, turn(busier, busier, delta_tokens=delta))
        assert all(high[pool] >= low[pool] - 1e-9 for pool in Pool)


@pytest.mark.parametrize("first_token_seconds", [0.05, None], ids=["streamed", "not streamed"])
@pytest.mark.parametrize("pool", list(Pool))
def test_speed_of_a_pool_is_learned_from_its_answers(pool: Pool, first_token_seconds: float | None) -> None:
    seen = replace(answer(pool, seconds_per_token=0.05), first_token_seconds=first_token_seconds)
    policy = learned(*[seen] * 100)
    assert predicted(policy, turn())[pool] == pytest.approx(0.05 + 50 * 0.05, rel=0.1)
    assert policy.decide(turn()).pool is pool.other


def test_effect_of_load_on_decoding_is_learned_from_bursts_that_were_sent_to_an_idle_engine() -> None:
    burst = [
        replace(
            answer(Pool.GREEDY, 0.01 + 0.0005 * running),
            decoding_load=running,
            view=replace(IDLE, running_limit=100),
        )
        for running in (1, 30, 60)
    ]
    policy = learned(*burst * 30)
    idle, busy = (replace(IDLE, in_flight=load, running_limit=100) for load in (0, 60))
    added = (
        predicted(policy, turn(greedy=busy))[Pool.GREEDY] - predicted(policy, turn(greedy=idle))[Pool.GREEDY]
    )
    assert added == pytest.approx(50 * 60 * 0.0005, rel=0.1)


@pytest.mark.parametrize("first_token_seconds", [0.05, None], ids=["streamed", "not streamed"])
def test_answer_that_was_mostly_interrupted_by_prefills_is_not_learned_as_slow_decoding(
    first_token_seconds: float | None,
) -> None:
    """The prefill of the later prompts takes 7 s."""
    usual = [answer(Pool.SPECULATIVE, seconds_per_token=0.007)] * 30
    interrupted = replace(
        answer(Pool.SPECULATIVE, seconds_per_token=0.16),
        first_token_seconds=first_token_seconds,
        later_prefill_tokens=100_000,
    )
    mistaken = replace(interrupted, later_prefill_tokens=0)
    expected = predicted(learned(*usual), turn())[Pool.SPECULATIVE]

    assert predicted(learned(*usual, *[interrupted] * 10), turn())[Pool.SPECULATIVE] == pytest.approx(
        expected, rel=0.02
    )
    assert predicted(learned(*usual, *[mistaken] * 10), turn())[Pool.SPECULATIVE] > 2 * expected


def test_wait_for_an_engine_that_runs_requests_one_after_another_is_learned() -> None:
    policy = learned(
        *(
            answer(Pool.SPECULATIVE, seconds_per_token=0.007, load=load % 8, wait_per_request=0.4)
            for load in range(160)
        )
    )
    busy = replace(IDLE, in_flight=7)
    assert predicted(policy, turn(speculative=busy))[Pool.SPECULATIVE] == pytest.approx(3.2, rel=0.2)
    assert policy.decide(turn(busy, busy)).pool is Pool.GREEDY


def test_queued_prompts_are_prefilled_as_far_as_such_prompts_were_not_cached() -> None:
    queued = turn(speculative=replace(IDLE, queued_prefill_tokens=100_000))
    cached = replace(answer(Pool.SPECULATIVE, seconds_per_token=0.007), view=replace(IDLE, prompt=MOVED))
    before = predicted(Adaptive(), queued)[Pool.SPECULATIVE]
    assert predicted(learned(*(cached for _ in range(20))), queued)[Pool.SPECULATIVE] < before / 2


def test_turns_that_follow_are_those_of_sessions_that_reached_the_same_turn() -> None:
    """One half of the sessions have 2 turns, the other half have 10."""
    workload = Workload()
    for _ in range(200):
        for turns in (2, 10):
            for number in range(1, turns + 1):
                workload.observe(number, output_tokens=50)
    following = [workload.turns_after(number) for number in (1, 2, 3, 9, 10)]
    assert following == pytest.approx([5, 4, 7, 1, 0], abs=0.5)


def test_shared_prefix_that_the_engine_reports_as_cached_makes_a_move_cheap() -> None:
    """The record of a session does not contain what other sessions have cached."""
    moved = replace(IDLE, prompt=MOVED)
    seen = replace(answer(Pool.SPECULATIVE, seconds_per_token=0.007), view=moved)
    before = predicted(Adaptive(), turn(moved))[Pool.SPECULATIVE]
    assert predicted(learned(*(seen for _ in range(20))), turn(moved))[Pool.SPECULATIVE] < before - 0.1


def test_what_was_learned_about_a_pool_is_forgotten_if_the_pool_has_no_turns() -> None:
    """Otherwise a pool that was slow once, for example because of a burst, would never be used again."""
    slow = [answer(Pool.SPECULATIVE, seconds_per_token=0.05) for _ in range(100)]
    usual = [answer(Pool.GREEDY, seconds_per_token=0.0091) for _ in range(600)]
    assert learned(*slow, *usual[:50]).decide(turn()).pool is Pool.GREEDY
    assert learned(*slow, *usual).decide(turn()).pool is Pool.SPECULATIVE


def fetched(replica: str, seconds_per_thousand: float) -> Observation:
    """A streamed answer after a fetch of 3,900 tokens."""
    each = answer(Pool.GREEDY, 0.0091)
    seconds = 0.02 + 3.9 * seconds_per_thousand
    return replace(
        each,
        view=fetching(replica),
        fetched_tokens=3_900,
        first_token_seconds=seconds,
        total_seconds=seconds + 50 * 0.0091,
    )


def fetching(replica: str) -> PoolView:
    return replace(IDLE, replica=replica, prompt=FETCHABLE)


def test_transfer_rate_is_learned_for_each_replica() -> None:
    near, far = fetched("near", 0.003), fetched("far", 0.150)
    policy = learned(*[near, far] * 50)
    by_replica = {
        name: predicted(policy, turn(greedy=fetching(name)))[Pool.GREEDY] for name in ("near", "far", "new")
    }
    assert by_replica["near"] == pytest.approx(near.total_seconds, rel=0.15)
    assert by_replica["far"] == pytest.approx(far.total_seconds, rel=0.15)
    assert by_replica["near"] < by_replica["new"] < by_replica["far"]
