"""The policy Adaptive: its predictions, its decisions, and the exchange between gateway replicas."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.prompt_tokens import PromptTokens
from dps_gateway.routing.adaptive import EXPLORATION, LONGEST, Adaptive, Workload
from dps_gateway.routing.decision import Decision, PoolView, Reason, Turn
from dps_gateway.routing.learning import LearningPolicy, Observation

GROWN = PromptTokens(held=3_900, fetchable=0, prefill=100)
"""A prompt of 4,000 tokens in the pool that served the previous turn."""

MOVED = PromptTokens(held=0, fetchable=0, prefill=4_000)
FETCHABLE = PromptTokens(held=0, fetchable=3_900, prefill=100)
"""The same prompt in the other pool, without and with a common prefix cache."""

IDLE = PoolView(
    ready_replicas=1,
    in_flight=0,
    queued=0,
    queued_prefill_tokens=0,
    running_limit=None,
    prompt=GROWN,
)

NOT_EXPLORING = 0.5

prompts = st.builds(PromptTokens, *[st.integers(0, 100_000)] * 3)

views = st.builds(
    PoolView,
    ready_replicas=st.integers(0, 3),
    in_flight=st.floats(0, 200),
    queued=st.floats(0, 200),
    queued_prefill_tokens=st.floats(0, 100_000),
    running_limit=st.none() | st.integers(1, 2048),
    prompt=prompts,
)

observations = st.builds(
    Observation,
    pool=st.sampled_from(Pool),
    prompt_tokens=st.integers(1, 100_000),
    delta_tokens=st.integers(0, 100_000),
    expected=prompts,
    cached_tokens=st.none() | st.integers(0, 100_000),
    fetched_tokens=st.none() | st.integers(0, 100_000),
    output_tokens=st.integers(0, 10_000),
    load=st.floats(0, 200),
    queued_prefill_tokens=st.floats(0, 100_000),
    first_token_seconds=st.none() | st.floats(0, 100),
    total_seconds=st.floats(100, 200),
    number=st.integers(1, 50),
)

histories = st.lists(observations, max_size=20)

unhurried = settings(deadline=None)
"""A busy machine could exceed the deadline of an example."""


def turn(speculative: PoolView = IDLE, greedy: PoolView = IDLE, **changed: Any) -> Turn:
    """The second turn of a session, whose prompt grew by 100 tokens."""
    values: dict[str, Any] = {
        "prompt_tokens": 4_000,
        "delta_tokens": 100,
        "draw": NOT_EXPLORING,
        "number": 2,
        "last_pool": None,
        "pools": {Pool.SPECULATIVE: speculative, Pool.GREEDY: greedy},
    }
    return Turn(**(values | changed))


def answer(pool: Pool, seconds_per_token: float, load: float = 0, wait_per_request: float = 0) -> Observation:
    """A streamed answer of 50 tokens on an engine with the given speed."""
    first = 0.05 + wait_per_request * load
    return Observation(
        pool=pool,
        prompt_tokens=4_000,
        delta_tokens=100,
        expected=GROWN,
        cached_tokens=3_900,
        fetched_tokens=None,
        output_tokens=50,
        load=load,
        queued_prefill_tokens=0,
        first_token_seconds=first,
        total_seconds=first + 50 * seconds_per_token,
        number=2,
    )


ACCURATE = [
    answer(pool, seconds)
    for _ in range(100)
    for pool, seconds in ((Pool.SPECULATIVE, 0.0070), (Pool.GREEDY, 0.0091))
]
"""Answers of both pools after which their speeds are known."""

STALLED = replace(
    answer(Pool.SPECULATIVE, seconds_per_token=0.007), first_token_seconds=1.0, total_seconds=1.35
)
"""An answer whose first token took longer than anything that has been learned explains."""


def learned(*history: Observation) -> Adaptive:
    policy = Adaptive()
    for each in history:
        policy.observe(each)
    return policy


def predicted(policy: Adaptive, turn: Turn) -> Mapping[Pool, float]:
    decision = policy.decide(turn)
    assert decision.predicted is not None
    return decision.predicted


def test_adaptive_is_a_learning_policy() -> None:
    assert isinstance(Adaptive(), LearningPolicy)


@unhurried
@given(history=histories, view=views, more=st.floats(0, 100))
def test_predicted_latency_does_not_fall_with_the_load(
    history: list[Observation], view: PoolView, more: float
) -> None:
    policy = learned(*history)
    view = replace(view, ready_replicas=1)
    low = predicted(policy, turn(speculative=view))[Pool.SPECULATIVE]
    for busier in (
        replace(view, in_flight=view.in_flight + more),
        replace(view, queued=view.queued + more),
        replace(view, queued_prefill_tokens=view.queued_prefill_tokens + 1_000 * more),
    ):
        assert predicted(policy, turn(speculative=busier))[Pool.SPECULATIVE] >= low - 1e-9


@unhurried
@given(history=histories, view=views, more=st.integers(0, 10_000), delta=st.integers(0, 5_000))
def test_predicted_latency_does_not_fall_with_the_tokens_to_prefill(
    history: list[Observation], view: PoolView, more: int, delta: int
) -> None:
    policy = learned(*history)
    view = replace(view, ready_replicas=1)
    longer = replace(view, prompt=replace(view.prompt, prefill=view.prompt.prefill + more))
    low = predicted(policy, turn(greedy=view, delta_tokens=delta))[Pool.GREEDY]
    assert predicted(policy, turn(greedy=longer, delta_tokens=delta))[Pool.GREEDY] >= low - 1e-9


@unhurried
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
    ):
        routed = turn(pools={**pools, chosen.other: busier}, last_pool=last)
        assert policy.decide(routed).pool is chosen


@unhurried
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


@unhurried
@given(history=histories, speculative=views, greedy=views)
def test_decision_depends_only_on_the_turn_and_the_observations(
    history: list[Observation], speculative: PoolView, greedy: PoolView
) -> None:
    policy, routed = learned(*history), turn(speculative, greedy)
    first = policy.decide(routed)
    policy.decide(turn(greedy, speculative, draw=0.0))
    assert policy.decide(routed) == first


def test_turn_goes_to_the_pool_with_the_lower_predicted_cost() -> None:
    decision = Adaptive().decide(turn())
    assert decision.predicted is not None
    assert decision.predicted[Pool.SPECULATIVE] < decision.predicted[Pool.GREEDY]
    assert decision == Decision(Pool.SPECULATIVE, Reason.PREDICTED_FASTER, decision.predicted)


def test_without_ready_replicas_nothing_is_predicted() -> None:
    down = replace(IDLE, ready_replicas=0)
    decision = Adaptive().decide(turn(down, down, last_pool=Pool.SPECULATIVE))
    assert decision == Decision(Pool.SPECULATIVE, Reason.FIXED)


def test_session_stays_while_a_move_costs_more_prefill_than_it_saves() -> None:
    moved = replace(IDLE, prompt=MOVED)
    assert Adaptive().decide(turn(moved, IDLE, last_pool=Pool.GREEDY)).pool is Pool.GREEDY


def test_session_moves_if_the_other_pool_can_fetch_its_prefix() -> None:
    moved = replace(IDLE, prompt=FETCHABLE)
    assert Adaptive().decide(turn(moved, IDLE, last_pool=Pool.GREEDY)).pool is Pool.SPECULATIVE


def moving(fetched_tokens: int, first_token_seconds: float) -> Observation:
    """The speculative pool's answer to a turn of which it could have fetched all but the new tokens."""
    return replace(
        answer(Pool.SPECULATIVE, seconds_per_token=0.007),
        expected=FETCHABLE,
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


@pytest.mark.parametrize("pool", list(Pool))
def test_speed_of_a_pool_is_learned_from_its_answers(pool: Pool) -> None:
    policy = learned(*(answer(pool, seconds_per_token=0.05) for _ in range(100)))
    assert predicted(policy, turn())[pool] == pytest.approx(0.05 + 50 * 0.05, rel=0.1)
    assert policy.decide(turn()).pool is pool.other


def test_answer_that_is_not_streamed_is_learned_from_as_well() -> None:
    seen = replace(answer(Pool.SPECULATIVE, seconds_per_token=0.05), first_token_seconds=None)
    policy = learned(*(seen for _ in range(100)))
    assert predicted(policy, turn())[Pool.SPECULATIVE] == pytest.approx(0.05 + 50 * 0.05, rel=0.1)


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


def test_turn_does_not_delay_the_prompts_that_are_queued_before_it() -> None:
    """Their prefill delays the turn, but is no cost to the other requests of the replica."""
    long_queue = replace(IDLE, in_flight=2, queued_prefill_tokens=150_000)
    many_requests = replace(IDLE, in_flight=30, queued_prefill_tokens=60_000)
    assert Adaptive().decide(turn(long_queue, many_requests, number=10)).pool is Pool.GREEDY


def test_queued_prompts_are_prefilled_as_far_as_such_prompts_were_not_cached() -> None:
    queued = turn(speculative=replace(IDLE, queued_prefill_tokens=100_000))
    cached = replace(answer(Pool.SPECULATIVE, seconds_per_token=0.007), expected=MOVED)
    before = predicted(Adaptive(), queued)[Pool.SPECULATIVE]
    assert predicted(learned(*(cached for _ in range(20))), queued)[Pool.SPECULATIVE] < before / 2


@pytest.mark.parametrize("pool", list(Pool))
def test_burst_of_first_turns_is_not_queued_on_an_engine_that_runs_requests_one_after_another(
    pool: Pool,
) -> None:
    """The engine reports this limit before it has answered the first request."""
    serial = {pool: replace(IDLE, in_flight=12, running_limit=1)}
    parallel = {pool.other: replace(IDLE, in_flight=40, running_limit=2048)}
    assert Adaptive().decide(turn(pools=serial | parallel, number=1)).pool is pool.other


def test_turns_that_follow_are_those_of_sessions_that_reached_the_same_turn() -> None:
    """One half of the sessions have 2 turns, the other half have 10."""
    workload = Workload()
    for _ in range(200):
        for turns in (2, 10):
            for number in range(1, turns + 1):
                workload.observe(replace(answer(Pool.GREEDY, 0.01), number=number))
    following = [workload.turns_after(number) for number in (1, 2, 3, 9, 10)]
    assert following == pytest.approx([5, 4, 7, 1, 0], abs=0.5)


def test_expected_turns_do_not_grow_while_no_session_starts() -> None:
    """At the end of a batch, the sessions in progress are the last ones."""
    workload = Workload()
    for _ in range(50):
        for number in range(1, 11):
            workload.observe(replace(answer(Pool.GREEDY, 0.01), number=number))
    for _ in range(50):
        for number in range(6, 11):
            workload.observe(replace(answer(Pool.GREEDY, 0.01), number=number))
    assert workload.turns_after(6) == pytest.approx(4, abs=0.5)


@given(history=histories, number=st.integers(1, 100))
def test_expected_number_of_turns_is_finite_and_not_negative(history: list[Observation], number: int) -> None:
    workload = Workload()
    for each in history:
        workload.observe(each)
    assert 0 <= workload.turns_after(number) < 100


def test_shared_prefix_that_the_engine_reports_as_cached_makes_a_move_cheap() -> None:
    """The record of a session does not contain what other sessions have cached."""
    moved = replace(IDLE, prompt=MOVED)
    seen = replace(answer(Pool.SPECULATIVE, seconds_per_token=0.007), expected=MOVED)
    before = predicted(Adaptive(), turn(moved))[Pool.SPECULATIVE]
    assert predicted(learned(*(seen for _ in range(20))), turn(moved))[Pool.SPECULATIVE] < before - 0.1


def test_pool_without_recent_answers_is_explored_rarely() -> None:
    policy = learned(*(answer(Pool.SPECULATIVE, seconds_per_token=0.007) for _ in range(200)))
    assert policy.decide(turn(draw=EXPLORATION / 2)).pool is Pool.GREEDY
    assert policy.decide(turn(draw=EXPLORATION)).pool is Pool.SPECULATIVE


def test_pool_that_is_still_answering_is_not_explored() -> None:
    """If it runs requests one after another, a long answer keeps it from answering others."""
    policy = learned(*(answer(Pool.SPECULATIVE, seconds_per_token=0.007) for _ in range(200)))
    answering = replace(IDLE, in_flight=1)
    assert policy.decide(turn(greedy=answering, draw=EXPLORATION / 2)).pool is Pool.SPECULATIVE
    assert policy.decide(turn(draw=EXPLORATION / 2)).pool is Pool.GREEDY


def test_replica_that_absorbs_a_document_predicts_as_if_it_had_observed_the_answers() -> None:
    history = [answer(pool, 0.02, load=load) for pool in Pool for load in range(5)]
    own, other = Adaptive(), learned(*history)
    own.absorb([json.loads(json.dumps(other.export()))])
    assert predicted(own, turn()) == pytest.approx(predicted(other, turn()), rel=0.05)


def test_absorbed_documents_replace_those_absorbed_before() -> None:
    document = learned(*(answer(Pool.GREEDY, 0.05) for _ in range(50))).export()
    once, twice = Adaptive(), Adaptive()
    once.absorb([document])
    twice.absorb([document])
    twice.absorb([document])
    assert predicted(twice, turn()) == pytest.approx(predicted(once, turn()))
    twice.absorb([])
    assert predicted(twice, turn()) == pytest.approx(predicted(Adaptive(), turn()))


def test_export_contains_only_own_observations() -> None:
    policy = Adaptive()
    before = policy.export()
    policy.absorb([learned(answer(Pool.GREEDY, 0.05)).export()])
    assert policy.export() == before


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 0},
        {"version": 1, "pools": [], "workload": []},
        Adaptive().export() | {"workload": [float("nan"), *[1] * LONGEST]},
        Adaptive().export() | {"workload": [256, 1, 1]},
        Adaptive().export() | {"pools": {"speculative": {}, "greedy": {}}},
    ],
    ids=["empty", "another version", "other types", "not a number", "missing counts", "missing sums"],
)
def test_documents_that_are_not_valid_are_ignored(document: dict[str, Any]) -> None:
    policy = Adaptive()
    policy.absorb([document])
    assert predicted(policy, turn()) == pytest.approx(predicted(Adaptive(), turn()))


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


def test_longer_queue_does_not_keep_a_session_in_a_pool_that_was_faster_than_predicted() -> None:
    """The doubt about a prediction grows with it, but must not grow faster than the predicted gain."""
    slow = [answer(Pool.GREEDY, 0.05, load=50, wait_per_request=0.02) for _ in range(60)]
    faster = [answer(Pool.GREEDY, 0.0091, load=50, wait_per_request=0.02) for _ in range(10)]
    policy = learned(*slow, *faster)
    busy = replace(IDLE, in_flight=100)
    longer = replace(busy, queued_prefill_tokens=1_000_000)
    for greedy in (busy, longer):
        routed = turn(IDLE, greedy, last_pool=Pool.GREEDY, number=40)
        assert policy.decide(routed).pool is Pool.SPECULATIVE


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


def test_what_was_learned_about_a_pool_is_forgotten_if_the_pool_has_no_turns() -> None:
    """Otherwise a pool that was slow once, for example because of a burst, would never be used again."""
    slow = [answer(Pool.SPECULATIVE, seconds_per_token=0.05) for _ in range(100)]
    usual = [answer(Pool.GREEDY, seconds_per_token=0.0091) for _ in range(600)]
    assert learned(*slow, *usual[:50]).decide(turn()).pool is Pool.GREEDY
    assert learned(*slow, *usual).decide(turn()).pool is Pool.SPECULATIVE
