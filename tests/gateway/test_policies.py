"""The routing rule: Eq. 2 of the paper, its extreme thresholds, its ablation and the fixed policies."""

import math
from dataclasses import MISSING, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.cached_prompt import PromptTokens
from dps_gateway.pool import Pool
from dps_gateway.routing import policies as policies_module
from dps_gateway.routing.decision import Decision, Policy, PolicyInput, PoolView, Reason
from dps_gateway.routing.policies import (
    POLICIES,
    AlwaysGreedy,
    AlwaysSpeculative,
    DeltaPrefill,
    Random,
    Sticky,
    TotalLength,
    policy_named,
)

WITHIN = Decision(Pool.SPECULATIVE, Reason.WITHIN_THRESHOLD)
OVER = Decision(Pool.GREEDY, Reason.OVER_THRESHOLD)

tokens = st.integers(min_value=0, max_value=1_000_000)


def turn(delta: int, length: int | None = None, draw: float = 0.0) -> PolicyInput:
    return PolicyInput(
        prompt_tokens=delta if length is None else length,
        delta_tokens=delta,
        draw=draw,
        number=1,
        last_pool=None,
        pools={},
    )


def loaded(load: float, ready_replicas: int = 1) -> PoolView:
    return PoolView(
        ready_replicas=ready_replicas,
        in_flight=load,
        queued=0,
        queued_prefill_tokens=0,
        free_tokens=math.inf,
        running_limit=None,
        replica="engine",
        prompt=PromptTokens(held=0, fetchable=0, prefill=0),
    )


@pytest.mark.parametrize(
    ("threshold", "delta", "expected"),
    [
        pytest.param(128, 127, WITHIN, id="delta below the threshold"),
        pytest.param(128, 128, WITHIN, id="delta equal to the threshold"),
        pytest.param(128, 129, OVER, id="delta above the threshold"),
        pytest.param(0, 1, OVER, id="threshold 0: every turn is greedy"),
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


@given(low=tokens, high=tokens, delta=tokens)
def test_speculation_is_monotonic_in_the_threshold(low: int, high: int, delta: int) -> None:
    low, high = sorted((low, high))
    if DeltaPrefill(low).decide(turn(delta)).pool is Pool.SPECULATIVE:
        assert DeltaPrefill(high).decide(turn(delta)).pool is Pool.SPECULATIVE


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


@pytest.mark.parametrize(
    ("threshold", "speculative"),
    [(0, 0), (32, 0), (64, 2), (65, 3), (128, 4), (256, 6), (4025, 6), (4096, 7), (None, 7)],
)
def test_more_turns_are_speculative_at_a_higher_threshold(threshold: int | None, speculative: int) -> None:
    """As in the `Spec %` column of Table 3, counted by hand on a few turns."""
    policy = DeltaPrefill(threshold)
    pools = [policy.decide(turn(delta)).pool for delta in (58, 64, 65, 128, 129, 256, 4026)]
    assert pools.count(Pool.SPECULATIVE) == speculative


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DeltaPrefill", DeltaPrefill(7)),
        ("TotalLength", TotalLength(7)),
        ("AlwaysSpeculative", AlwaysSpeculative()),
        ("AlwaysGreedy", AlwaysGreedy()),
        ("Random", Random()),
        ("Sticky", Sticky()),
    ],
)
def test_policy_is_built_by_its_registered_name(name: str, expected: Policy) -> None:
    assert policy_named(name, 7) == expected


def test_registry_lists_every_policy() -> None:
    policies = vars(policies_module).values()
    defined = {
        each.__name__
        for each in policies
        if isinstance(each, type) and hasattr(each, "decide") and each is not Policy
    }
    assert set(POLICIES) == defined


def test_every_input_of_a_policy_is_required() -> None:
    """With a default, the gateway or the simulator could omit an input unnoticed."""
    assert [each.name for each in fields(PolicyInput) if each.default is not MISSING] == []


def test_unknown_policy_error_lists_the_registered_names() -> None:
    with pytest.raises(ValueError, match=r"there is no policy 'Deltaprefill'; choose one of DeltaPrefill, "):
        policy_named("Deltaprefill", 128)
