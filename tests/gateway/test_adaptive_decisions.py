"""The decisions of the policy Adaptive: when a turn goes to a pool, and when a session moves."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import EXPLORATION, Adaptive
from dps_gateway.routing.decision import Observation, PoolView, PromptTokens, Reason
from tests.gateway.adaptive_turns import (
    ACCURATE,
    FETCHABLE,
    IDLE,
    MOVED,
    STALLED,
    answer,
    histories,
    learned,
    predicted,
    turn,
    views,
)


@given(
    history=histories,
    speculative=views,
    greedy=views,
    more=st.integers(1, 100),
    last=st.sampled_from([None, *Pool]),
)
def test_more_load_on_a_pool_never_attracts_a_turn(
    history: list[Observation], speculative: PoolView, greedy: PoolView, more: int, last: Pool | None
) -> None:
    policy = learned(*history)
    pools = {
        Pool.SPECULATIVE: replace(speculative, ready_replicas=1),
        Pool.GREEDY: replace(greedy, ready_replicas=1),
    }
    chosen = policy.decide(turn(pools=pools, last_pool=last)).pool
    view = pools[chosen.other]
    for busier in (
        replace(view, in_flight=view.in_flight + more),
        replace(view, queued=view.queued + more),
        replace(view, queued_prefill_tokens=view.queued_prefill_tokens + 1_000 * more),
        replace(view, prompt=replace(view.prompt, prefill=view.prompt.prefill + 100 * more)),
        replace(view, free_tokens=min(view.free_tokens, 100_000) - 1_000 * more),
    ):
        routed = turn(pools={**pools, chosen.other: busier}, last_pool=last)
        assert policy.decide(routed).pool is chosen


@given(
    history=histories,
    speculative=views,
    greedy=views,
    draw=st.floats(0, 1, exclude_max=True),
    last=st.sampled_from([None, *Pool]),
)
def test_pool_without_ready_replicas_is_never_chosen(
    history: list[Observation], speculative: PoolView, greedy: PoolView, draw: float, last: Pool | None
) -> None:
    routed = turn(speculative, greedy, draw=draw, last_pool=last)
    ready = {pool for pool, view in routed.pools.items() if view.ready_replicas}
    decision = learned(*history).decide(routed)
    assert not ready or decision.pool in ready
    assert decision.predicted is None or set(decision.predicted) == ready


@given(history=histories, speculative=views, greedy=views)
def test_decision_depends_only_on_the_turn_and_the_observations(
    history: list[Observation], speculative: PoolView, greedy: PoolView
) -> None:
    policy, routed = learned(*history), turn(speculative, greedy)
    first = policy.decide(routed)
    policy.decide(turn(greedy, speculative, draw=0.0))
    assert policy.decide(routed) == first


@pytest.mark.parametrize(("prompt", "pool"), [(MOVED, Pool.GREEDY), (FETCHABLE, Pool.SPECULATIVE)])
def test_session_moves_only_if_the_other_pool_can_fetch_its_prefix(prompt: PromptTokens, pool: Pool) -> None:
    assert Adaptive().decide(turn(replace(IDLE, prompt=prompt), IDLE, last_pool=Pool.GREEDY)).pool is pool


def moving(fetched_tokens: int, first_token_seconds: float) -> Observation:
    """The speculative pool's answer to a turn of which it could have fetched all but the new tokens."""
    return replace(
        answer(Pool.SPECULATIVE, seconds_per_token=0.007),
        view=replace(IDLE, prompt=FETCHABLE),
        cached_tokens=fetched_tokens,
        fetched_tokens=fetched_tokens,
        first_token_seconds=first_token_seconds,
        total_seconds=first_token_seconds + 50 * 0.007,
    )


@pytest.mark.parametrize(
    ("fetched_tokens", "first_token_seconds", "pool"),
    [
        pytest.param(3_900, 0.03, Pool.SPECULATIVE, id="fast storage"),
        pytest.param(3_900, 1.0, Pool.GREEDY, id="storage slower than prefill"),
        pytest.param(0, 0.35, Pool.GREEDY, id="storage that serves nothing"),
    ],
)
def test_session_moves_only_if_fetching_was_observed_to_be_faster(
    fetched_tokens: int, first_token_seconds: float, pool: Pool
) -> None:
    """A prefill of 4,000 tokens takes 0.3 s. No further turns are expected after the 40th."""
    policy = learned(*(moving(fetched_tokens, first_token_seconds) for _ in range(30)))
    moved = replace(IDLE, prompt=FETCHABLE)
    last = turn(moved, IDLE, last_pool=Pool.GREEDY, number=40)
    assert policy.decide(last).pool is pool
    assert predicted(policy, last)[Pool.SPECULATIVE] == pytest.approx(
        first_token_seconds + 50 * 0.007, rel=0.2
    )


@pytest.mark.parametrize(
    ("free_tokens", "pool"),
    [
        pytest.param(math.inf, Pool.SPECULATIVE, id="unknown memory"),
        pytest.param(4_000, Pool.SPECULATIVE, id="memory for the prompt"),
        pytest.param(-100_000, Pool.GREEDY, id="no memory for the queued prompts either"),
    ],
)
def test_turn_avoids_a_pool_in_which_it_would_evict_other_prompts(free_tokens: float, pool: Pool) -> None:
    full = replace(IDLE, free_tokens=free_tokens)
    assert learned(*ACCURATE).decide(turn(speculative=full, number=40)).pool is pool


def test_turn_does_not_delay_the_prompts_that_are_queued_before_it() -> None:
    """Their prefill delays the turn, but is no cost to the other requests of the replica."""
    long_queue = replace(IDLE, in_flight=2, queued_prefill_tokens=150_000)
    many_requests = replace(IDLE, in_flight=30, queued_prefill_tokens=60_000)
    assert Adaptive().decide(turn(long_queue, many_requests, number=10)).pool is Pool.GREEDY


@pytest.mark.parametrize("pool", list(Pool))
def test_burst_of_first_turns_is_not_queued_on_an_engine_that_runs_requests_one_after_another(
    pool: Pool,
) -> None:
    """The engine reports this limit before it has answered the first request."""
    serial = {pool: replace(IDLE, in_flight=12, running_limit=1)}
    parallel = {pool.other: replace(IDLE, in_flight=40, running_limit=2048)}
    assert Adaptive().decide(turn(pools=serial | parallel, number=1)).pool is pool.other


def test_pool_without_recent_answers_is_explored_rarely_and_not_while_it_is_answering() -> None:
    """If it runs requests one after another, a long answer keeps it from answering others."""
    policy = learned(*(answer(Pool.SPECULATIVE, seconds_per_token=0.007) for _ in range(200)))
    assert policy.decide(turn(draw=EXPLORATION / 2)).pool is Pool.GREEDY
    assert policy.decide(turn(draw=EXPLORATION)).pool is Pool.SPECULATIVE
    answering = replace(IDLE, in_flight=1)
    assert policy.decide(turn(greedy=answering, draw=EXPLORATION / 2)).pool is Pool.SPECULATIVE


def test_session_stays_while_predictions_are_less_accurate_than_the_gain_that_they_predict() -> None:
    """The speculative pool is predicted to be faster, but the last predictions were far from the actual latencies."""
    routed = turn(last_pool=Pool.GREEDY)
    assert learned(*ACCURATE).decide(routed).pool is Pool.SPECULATIVE
    decision = learned(*ACCURATE, *[STALLED] * 3).decide(routed)
    assert (decision.pool, decision.reason) == (Pool.GREEDY, Reason.FIXED)
    assert decision.predicted is not None
    assert decision.predicted[Pool.SPECULATIVE] < decision.predicted[Pool.GREEDY]


def test_long_answers_are_no_prediction_errors() -> None:
    """The length of an answer does not depend on the pool."""
    long = replace(answer(Pool.SPECULATIVE, 0.0), output_tokens=300, total_seconds=0.05 + 300 * 0.0070)
    decision = learned(*ACCURATE, *[long] * 3).decide(turn(last_pool=Pool.GREEDY))
    assert (decision.pool, decision.reason) == (Pool.SPECULATIVE, Reason.PREDICTED_FASTER)


def test_session_does_not_move_for_a_gain_that_is_small_relative_to_its_cost() -> None:
    """At 15 requests on each replica, a large part of the cost of a turn is the time that it adds to the others."""
    history = [
        answer(pool, seconds, load=load, wait_per_request=0.004)
        for load in range(0, 40, 2)
        for pool, seconds in ((Pool.SPECULATIVE, 0.0070), (Pool.GREEDY, 0.0091))
    ]
    policy = learned(*history)
    for load, pool in ((0, Pool.SPECULATIVE), (15, Pool.GREEDY)):
        view = replace(IDLE, in_flight=load)
        routed = turn(view, view, last_pool=Pool.GREEDY, number=40)
        assert policy.decide(routed).pool is pool
        times = predicted(policy, routed)
        assert times[Pool.SPECULATIVE] < 0.9 * times[Pool.GREEDY]


def test_new_session_goes_to_the_less_loaded_pool_while_predictions_are_not_accurate() -> None:
    routed = turn(speculative=replace(IDLE, in_flight=0.5), number=1, delta_tokens=4_000)
    assert learned(*ACCURATE).decide(routed).pool is Pool.SPECULATIVE
    decision = learned(*ACCURATE, *[STALLED] * 5).decide(routed)
    assert (decision.pool, decision.reason) == (Pool.GREEDY, Reason.FIXED)


def test_session_leaves_a_pool_that_is_slower_than_predicted() -> None:
    slow = [answer(Pool.GREEDY, seconds_per_token=0.015) for _ in range(20)]
    decision = learned(*ACCURATE, *slow).decide(turn(last_pool=Pool.GREEDY, number=10))
    assert (decision.pool, decision.reason) == (Pool.SPECULATIVE, Reason.PREDICTED_FASTER)
