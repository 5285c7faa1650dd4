"""Acceptance of drafts: what is remembered of a session, expected of a new one, and predicted from it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_gateway.acceptance import REFERENCE, UNKNOWN, Acceptance
from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.decision import Observation, PoolView
from dps_gateway.routing.policies import DeltaPrefill
from tests.gateway.adaptive_turns import ACCURATE, IDLE, answer, histories, learned, observations, turn, views


def known(tokens_per_verification: float) -> Acceptance:
    """What is known after a long first turn."""
    return UNKNOWN.observed(round(1000 * tokens_per_verification), 1000, turn=1)


lengths = st.floats(1.0, 8.0)


@settings(max_examples=50)
@given(
    history=histories,
    speculative=views,
    greedy=views,
    tokens=st.tuples(lengths, lengths).map(sorted),
    last=st.sampled_from([None, *Pool]),
)
def test_lower_acceptance_never_improves_the_prediction_of_the_speculative_pool_or_attracts_a_turn(
    history: list[Observation],
    speculative: PoolView,
    greedy: PoolView,
    tokens: list[float],
    last: Pool | None,
) -> None:
    policy = learned(*history)
    pools = (replace(speculative, ready_replicas=1), replace(greedy, ready_replicas=1))
    low, high = (policy.decide(turn(*pools, last_pool=last, acceptance=known(length))) for length in tokens)
    assert low.predicted is not None
    assert high.predicted is not None
    assert low.predicted[Pool.SPECULATIVE] >= high.predicted[Pool.SPECULATIVE]
    assert low.predicted[Pool.GREEDY] == high.predicted[Pool.GREEDY]
    assert (low.pool, high.pool) != (Pool.SPECULATIVE, Pool.GREEDY)


@settings(max_examples=30)
@given(history=histories, speculative=views, greedy=views, last=st.sampled_from([None, *Pool]))
def test_equal_acceptance_of_all_sessions_leads_to_the_decisions_without_reports(
    history: list[Observation], speculative: PoolView, greedy: PoolView, last: Pool | None
) -> None:
    # REFERENCE tokens per verification require a multiple of 47 tokens.
    # Of answers that were not streamed, nothing is inferred.
    silent = [
        replace(
            each,
            output_tokens=47 * (each.output_tokens % 200),
            verifications=None,
            first_token_seconds=None,
        )
        for each in history
    ]
    reporting = [
        replace(each, verifications=each.output_tokens * 20 // 47) if each.pool is Pool.SPECULATIVE else each
        for each in silent
    ]
    pools = (speculative, greedy)
    without = learned(*silent).decide(turn(*pools, last_pool=last))
    decision = learned(*reporting).decide(turn(*pools, last_pool=last, acceptance=known(REFERENCE)))
    assert (decision.pool, decision.reason) == (without.pool, without.reason)


@given(prior=lengths, actual=lengths, verifications=st.integers(8, 500))
def test_wrong_expectation_is_outweighed_after_a_few_turns(
    prior: float, actual: float, verifications: int
) -> None:
    session = UNKNOWN
    assert session.expected_tokens(prior, 1) == prior
    for number in (1, 2, 3):
        session = session.observed(round(actual * verifications), verifications, number)
    error = abs(session.expected_tokens(prior, 4) - actual)
    assert error <= 0.25 * abs(prior - actual) + 1 / verifications


def test_what_is_known_is_forgotten_while_the_session_is_served_without_drafts() -> None:
    expected = [known(4.0).expected_tokens(2.0, number) for number in (2, 10, 30)]
    assert expected == sorted(expected, reverse=True)
    assert expected[0] == pytest.approx(4.0, rel=0.01)
    assert expected[-1] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    "stored", [(1, 2, 1), (2, -1, 1), (1, 1, -1), (2**60, 1, 1), ("x", 1, 1), (1, 1, 1, 1)]
)
def test_impossible_stored_numbers_are_refused(stored: tuple[int, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Acceptance.decode(*stored)


def drafted(kind: str, verifications: int) -> Observation:
    """An answer of 50 tokens of the speculative pool, with this number of verifications."""
    return replace(answer(Pool.SPECULATIVE, 0.007), turn=turn(kind=kind), verifications=verifications)


def expected(policy: Adaptive, kind: str) -> float:
    """Expected tokens per verification of a new session."""
    found = policy.decide(turn(kind=kind)).expected_tokens
    assert found is not None
    return found


def test_new_session_is_expected_to_be_like_those_of_its_kind_and_an_unknown_kind_like_all() -> None:
    policy = learned(*[drafted("code", 14), drafted("prose", 40)] * 50)
    assert expected(Adaptive(), "code") == REFERENCE
    assert expected(policy, "code") == pytest.approx(50 / 14, rel=0.1)
    assert expected(policy, "prose") == pytest.approx(50 / 40, rel=0.1)
    assert expected(policy, "prose") < expected(policy, "other") < expected(policy, "code")


def test_reported_verifications_are_not_replaced_by_inferred_ones() -> None:
    policy = learned(*ACCURATE)
    assert policy.verifications(drafted("code", 14)) == 14
    assert policy.verifications(drafted("code", 0)) is None


@given(history=histories, seen=observations, longer=st.floats(0, 100))
def test_inferred_acceptance_never_rises_with_the_duration_of_the_answer(
    history: list[Observation], seen: Observation, longer: float
) -> None:
    policy, unreported = learned(*history), replace(seen, verifications=None)
    slower = replace(unreported, total_seconds=seen.total_seconds + longer)
    fast, slow = policy.verifications(unreported), policy.verifications(slower)
    for inferred in (fast, slow):
        assert inferred is None or (seen.pool is Pool.SPECULATIVE and 1 <= inferred <= seen.output_tokens)
    assert fast is None or slow is None or slow >= fast


def test_acceptance_is_inferred_from_the_time_per_token_if_engines_report_none() -> None:
    def unreported(kind: str, seconds_per_token: float, load: int) -> Observation:
        seen = answer(Pool.SPECULATIVE, seconds_per_token * (1 + load / 10), load)
        return replace(seen, turn=replace(seen.turn, kind=kind))

    usual = answer(Pool.SPECULATIVE, 0.0070)
    verifications = learned(*ACCURATE).verifications(usual)
    assert verifications is not None
    assert usual.output_tokens / verifications == pytest.approx(REFERENCE, rel=0.05)
    policy = learned(
        *[unreported(*kind, load) for load in (0, 5) * 50 for kind in (("code", 0.005), ("prose", 0.010))]
    )
    assert expected(policy, "code") / expected(policy, "prose") == pytest.approx(2, rel=0.15)
    assert expected(policy, "prose") < expected(policy, "other") < expected(policy, "code")
    waited = replace(unreported("code", 0.01, 0), first_token_seconds=None)
    assert policy.verifications(waited) is None


def test_sessions_with_different_acceptance_are_routed_apart() -> None:
    policy = learned(*[drafted("", 22), answer(Pool.GREEDY, 0.0075)] * 50)
    pools = [policy.decide(turn(acceptance=known(length))).pool for length in (1.3, 3.4)]
    assert pools == [Pool.GREEDY, Pool.SPECULATIVE]


def test_replica_knows_the_kinds_that_others_have_observed() -> None:
    own, other = learned(drafted("own", 20)), learned(*[drafted("code", 14)] * 50)
    own.absorb([json.loads(json.dumps(other.export()))])
    assert expected(own, "code") == pytest.approx(50 / 14, rel=0.1)
    own.absorb([])
    assert expected(own, "code") == expected(own, "unknown")


def test_exploration_of_an_unknown_session_needs_an_idle_speculative_pool() -> None:
    busy_history = [drafted("", 40), answer(Pool.GREEDY, 0.0075)] * 60
    policy = learned(*busy_history)
    greedy = turn(draw=0.0, last_pool=Pool.GREEDY)
    assert policy.decide(replace(greedy, draw=0.5)).pool is Pool.GREEDY
    assert policy.decide(greedy).pool is Pool.SPECULATIVE
    assert policy.decide(replace(greedy, acceptance=known(1.2))).pool is Pool.GREEDY
    answering = turn(replace(IDLE, in_flight=1), draw=0.0, last_pool=Pool.GREEDY)
    assert policy.decide(answering).pool is Pool.GREEDY


@given(length=lengths, required=lengths, delta=st.integers(0, 300))
def test_delta_prefill_with_a_minimum_keeps_sessions_with_low_acceptance_in_the_greedy_pool(
    length: float, required: float, delta: int
) -> None:
    routed = turn(acceptance=known(length), delta_tokens=delta)
    decision = DeltaPrefill(128, required).decide(routed)
    assert decision.expected_tokens is not None
    allowed = delta <= 128 and decision.expected_tokens >= required
    assert decision.pool is (Pool.SPECULATIVE if allowed else Pool.GREEDY)
    unknown = replace(routed, acceptance=UNKNOWN)
    assert DeltaPrefill(128, required).decide(unknown).pool is DeltaPrefill(128).decide(unknown).pool


def test_only_a_turn_that_changes_what_is_known_is_recorded() -> None:
    session = known(3.0)
    assert UNKNOWN.changed_by(30, 10, turn=1)
    assert session.changed_by(150, 100, turn=2)
    assert not session.changed_by(300, 100, turn=2)
