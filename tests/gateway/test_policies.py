"""The routing rule: Eq. 2 of the paper, its extreme thresholds, its ablation and the fixed policies."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, PolicyInput, PoolView, Reason
from dps_gateway.routing.policies import (
    AlwaysGreedy,
    AlwaysSpeculative,
    DeltaPrefill,
    Random,
    Sticky,
    TotalLength,
    policy_named,
)
from tests.gateway.adaptive_turns import IDLE
from tests.gateway.adaptive_turns import turn as any_turn

WITHIN = Decision(Pool.SPECULATIVE, Reason.WITHIN_THRESHOLD)
OVER = Decision(Pool.GREEDY, Reason.OVER_THRESHOLD)

tokens = st.integers(min_value=0, max_value=1_000_000)


def turn(delta: int, length: int | None = None, draw: float = 0.0) -> PolicyInput:
    prompt_tokens = delta if length is None else length
    return any_turn(delta_tokens=delta, prompt_tokens=prompt_tokens, draw=draw)


def loaded(load: float, ready_replicas: int = 1) -> PoolView:
    return replace(IDLE, in_flight=load, ready_replicas=ready_replicas)


@pytest.mark.parametrize(
    ("threshold", "delta", "expected"),
    [
        pytest.param(128, 128, WITHIN, id="delta equal to the threshold"),
        pytest.param(128, 129, OVER, id="delta above the threshold"),
        pytest.param(0, 0, OVER, id="threshold 0: even a repeated turn is greedy"),
        pytest.param(1, 0, WITHIN, id="a repeated turn has delta 0"),
        pytest.param(None, 10**9, WITHIN, id="no threshold: every turn is speculative"),
    ],
)
def test_delta_prefill_compares_delta_with_the_threshold(
    threshold: int | None, delta: int, expected: Decision
) -> None:
    assert DeltaPrefill(threshold).decide(turn(delta, length=10**6)) == expected


@given(threshold=st.integers(min_value=1, max_value=100_000), delta=tokens, length=tokens)
def test_delta_prefill_is_equation_2_for_any_length(threshold: int, delta: int, length: int) -> None:
    speculates = DeltaPrefill(threshold).decide(turn(delta, length)).pool is Pool.SPECULATIVE
    assert speculates == (delta <= threshold)


@given(threshold=tokens, delta=tokens, length=tokens)
def test_total_length_applies_the_same_rule_to_the_whole_prompt(
    threshold: int, delta: int, length: int
) -> None:
    assert TotalLength(threshold).decide(turn(delta, length)) == DeltaPrefill(threshold).decide(turn(length))


@given(delta=tokens)
def test_fixed_policies_ignore_the_turn(delta: int) -> None:
    assert AlwaysSpeculative().decide(turn(delta)) == Decision(Pool.SPECULATIVE, Reason.FIXED)
    assert AlwaysGreedy().decide(turn(delta)) == Decision(Pool.GREEDY, Reason.FIXED)


@given(draw=st.floats(min_value=0, max_value=1, exclude_max=True), delta=tokens)
def test_random_policy_selects_both_pools_with_equal_probability(draw: float, delta: int) -> None:
    expected = Pool.SPECULATIVE if draw < 0.5 else Pool.GREEDY
    assert Random().decide(turn(delta, draw=draw)) == Decision(expected, Reason.FIXED)


@pytest.mark.parametrize(
    ("last_pool", "speculative", "greedy", "expected"),
    [
        pytest.param(
            None, loaded(3), loaded(2), Pool.GREEDY, id="a new session goes to the less loaded pool"
        ),
        pytest.param(None, loaded(2), loaded(2), Pool.SPECULATIVE, id="speculative if the loads are equal"),
        pytest.param(None, loaded(0, 0), loaded(9), Pool.GREEDY, id="not to a pool without ready replicas"),
        pytest.param(Pool.GREEDY, loaded(0), loaded(9), Pool.GREEDY, id="a session stays, whatever the load"),
    ],
)
def test_sticky_keeps_a_session_in_the_pool_where_it_began(
    last_pool: Pool | None, speculative: PoolView, greedy: PoolView, expected: Pool
) -> None:
    pools = {Pool.SPECULATIVE: speculative, Pool.GREEDY: greedy}
    decision = Sticky().decide(replace(turn(100), last_pool=last_pool, pools=pools))
    assert decision == Decision(expected, Reason.FIXED)


def test_unknown_policy_error_lists_the_registered_names() -> None:
    with pytest.raises(ValueError, match=r"there is no policy 'Deltaprefill'; choose one of DeltaPrefill, "):
        policy_named("Deltaprefill", 128)
