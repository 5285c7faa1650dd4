"""Simulated runs: properties that hold for every trace, fleet and seed.

Regret is how much longer the mean session took than under the best static policy on the same fleet.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import POLICIES, AlwaysGreedy, AlwaysSpeculative, DeltaPrefill, policy_named
from dps_lab.simulate.compare import regret
from dps_lab.simulate.fleet import FleetError, FleetSpec, parse_fleet
from dps_lab.simulate.report import session_seconds, summarize
from dps_lab.simulate.run import Load, Scenario, TraceTooLong, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace, TurnLengths

BOTH = FleetSpec({Pool.SPECULATIVE: 1, Pool.GREEDY: 1})
GREEDY_ONLY = FleetSpec({Pool.SPECULATIVE: 0, Pool.GREEDY: 1})
SPECULATIVE_ONLY = FleetSpec({Pool.SPECULATIVE: 1, Pool.GREEDY: 0})
CLOSED = Load(concurrency=4)


@st.composite
def traces(draw: st.DrawFn) -> list[SessionTrace]:
    sessions = []
    for number in range(draw(st.integers(1, 6))):
        length, turns = draw(st.integers(50, 2000)), []
        prefix_tokens = draw(st.integers(0, length))
        for _ in range(draw(st.integers(1, 4))):
            output = draw(st.integers(1, 30))
            turns.append(TurnLengths(prompt_tokens=length, output_tokens=output, think_seconds=0.5))
            length += output + draw(st.integers(0, 600))
        sessions.append(
            SessionTrace(
                id=f"s{number}",
                prefix=draw(st.sampled_from([None, "p", "q"])),
                prefix_tokens=prefix_tokens,
                arrival_seconds=float(number),
                turns=turns,
            )
        )
    return sessions


fleets = st.builds(
    FleetSpec,
    engines=st.builds(
        lambda s, g: {Pool.SPECULATIVE: s, Pool.GREEDY: g}, st.integers(0, 2), st.integers(1, 2)
    ),
    one_gpu=st.just(False),
    cache=st.sampled_from(["separate", "common"]),
    serialized=st.booleans(),
)
scenarios = st.builds(
    Scenario,
    fleet=fleets | st.just(replace(BOTH, one_gpu=True)),
    policy=st.sampled_from(sorted(POLICIES)).map(lambda name: policy_named(name, 128)),
    load=st.sampled_from([Load(concurrency=1), CLOSED, Load(rate=2.0), Load()]),
    replicas=st.integers(1, 3),
    seed=st.integers(0, 3),
)
thorough = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
"""Simulations take tens of milliseconds, and more on a busy machine."""


def trace(sessions: int = 12, turns: int = 4, first: int = 2000, growth: int = 100) -> list[SessionTrace]:
    return [
        SessionTrace(
            id=f"s{number}",
            turns=[
                TurnLengths(prompt_tokens=first + growth * turn, output_tokens=30) for turn in range(turns)
            ],
        )
        for number in range(sessions)
    ]


def batch_seconds(sessions: list[SessionTrace], scenario: Scenario) -> float:
    return summarize(simulate(sessions, scenario), scenario.fleet.gpus, 0.0).batch_seconds


@thorough
@given(traces(), scenarios)
def test_every_turn_is_served_once_after_the_one_before_and_every_token_is_generated(
    sessions: list[SessionTrace], scenario: Scenario
) -> None:
    results = simulate(sessions, scenario)
    expected = {
        (session.id, number): (turn.prompt_tokens, turn.output_tokens)
        for session in sessions
        for number, turn in enumerate(session.turns)
    }
    assert len(results) == len(expected)
    assert {(r.session, r.number): (r.prompt_tokens, r.output_tokens) for r in results} == expected
    ended: dict[str, TurnResult] = {}
    for result in results:
        assert 0 <= result.sent < result.first_token <= result.finished
        assert 0 <= result.cached_tokens < result.prompt_tokens
        before = ended.get(result.session)
        if before is not None:
            assert result.number == before.number + 1
            assert result.sent >= before.finished + 0.5
        ended[result.session] = result


def test_sessions_of_an_open_loop_arrive_at_the_mean_rate() -> None:
    turn = TurnLengths(prompt_tokens=50, output_tokens=1)
    sessions = [SessionTrace(id=f"s{number}", turns=[turn]) for number in range(1000)]
    results = simulate(sessions, Scenario(GREEDY_ONLY, AlwaysGreedy(), Load(rate=5.0)))
    assert len(sessions) / max(result.sent for result in results) == pytest.approx(5.0, rel=0.1)


@thorough
@given(traces(), scenarios)
def test_a_run_depends_on_nothing_but_its_seed(sessions: list[SessionTrace], scenario: Scenario) -> None:
    assert simulate(sessions, scenario) == simulate(sessions, scenario)


@settings(thorough, max_examples=10)
@given(traces(), scenarios)
def test_regret_is_never_negative(sessions: list[SessionTrace], scenario: Scenario) -> None:
    assert regret(sessions, scenario, simulate(sessions, scenario)) >= 0


@thorough
@given(traces(), scenarios, st.sampled_from([(0, AlwaysGreedy()), (None, AlwaysSpeculative())]))
def test_a_threshold_of_zero_or_without_bound_is_a_static_policy(
    sessions: list[SessionTrace],
    scenario: Scenario,
    case: tuple[int | None, AlwaysGreedy | AlwaysSpeculative],
) -> None:
    threshold, static = case
    with_threshold, without = (
        [(r.session, r.sent, r.first_token, r.finished) for r in simulate(sessions, each)]
        for each in (replace(scenario, policy=DeltaPrefill(threshold)), replace(scenario, policy=static))
    )
    assert with_threshold == without


def test_serialized_speculation_gains_nothing_from_concurrency_and_batched_speculation_does() -> None:
    def ratio(serialized: bool) -> float:
        fleet = replace(SPECULATIVE_ONLY, serialized=serialized)
        one, eight = (
            batch_seconds(trace(24), Scenario(fleet, AlwaysSpeculative(), Load(concurrency=c)))
            for c in (1, 8)
        )
        return one / eight

    assert ratio(serialized=True) < 1.2
    assert ratio(serialized=False) > 2.5


def test_two_busy_engines_on_one_gpu_take_longer_than_on_two() -> None:
    scenario = Scenario(BOTH, policy_named("Random", None), Load(concurrency=8))
    apart = batch_seconds(trace(24), scenario)
    together = batch_seconds(trace(24), replace(scenario, fleet=replace(BOTH, one_gpu=True)))
    assert 1.2 * apart < together <= 2.1 * apart


def test_a_common_cache_saves_the_prefill_of_a_session_that_moves() -> None:
    scenario = Scenario(BOTH, policy_named("Random", None), Load(concurrency=1), seed=1)
    separate, common = (
        simulate(trace(), replace(scenario, fleet=replace(BOTH, cache=cache)))
        for cache in ("separate", "common")
    )
    assert any(result.moved for result in separate)
    assert sum(r.cached_tokens for r in common) > sum(r.cached_tokens for r in separate)
    assert sum(session_seconds(common)) < sum(session_seconds(separate))


def test_a_second_session_finds_the_shared_prefix_cached() -> None:
    sessions = [
        SessionTrace(
            id=name,
            prefix="tools",
            prefix_tokens=1500,
            turns=[TurnLengths(prompt_tokens=1600, output_tokens=5)],
        )
        for name in ("first", "second")
    ]
    first, second = simulate(sessions, Scenario(GREEDY_ONLY, AlwaysGreedy(), Load(concurrency=1)))
    assert (first.cached_tokens, second.cached_tokens) == (0, 1500)


def test_think_time_delays_a_turn_and_is_not_part_of_the_session_latency() -> None:
    def run(think: float) -> list[TurnResult]:
        turns = [
            TurnLengths(prompt_tokens=length, output_tokens=5, think_seconds=think) for length in (100, 200)
        ]
        session = SessionTrace(id="a", turns=turns)
        return simulate([session], Scenario(GREEDY_ONLY, AlwaysGreedy(), Load(concurrency=1)))

    assert run(10.0)[1].sent == pytest.approx(run(0.0)[1].sent + 20.0)
    assert session_seconds(run(10.0)) == pytest.approx(session_seconds(run(0.0)))


def test_sessions_arrive_at_their_recorded_times() -> None:
    sessions = [
        session.model_copy(update={"arrival_seconds": 100.0 + 7.0 * number})
        for number, session in enumerate(trace(sessions=3, turns=1))
    ]
    results = simulate(sessions, Scenario(GREEDY_ONLY, AlwaysGreedy(), Load()))
    assert [result.sent for result in results] == [0.0, 7.0, 14.0]


def test_a_turn_that_exceeds_the_kv_cache_is_named_in_the_error() -> None:
    [session] = trace(sessions=1, turns=1, first=2_000_000)
    with pytest.raises(TraceTooLong, match=r"session 's0': turns\[0\] needs 2,000,030 tokens"):
        simulate([session], Scenario(GREEDY_ONLY, AlwaysGreedy(), CLOSED))


def test_a_fleet_is_parsed_into_the_number_of_engines_per_kind() -> None:
    assert parse_fleet("speculative=2, greedy=0") == ({Pool.SPECULATIVE: 2, Pool.GREEDY: 0}, 0)
    assert parse_fleet("greedy=3") == ({Pool.SPECULATIVE: 0, Pool.GREEDY: 3}, 0)
    assert parse_fleet("adaptive=2,speculative=1") == ({Pool.SPECULATIVE: 3, Pool.GREEDY: 0}, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast=1", "'fast' is not a kind of engine"),
        ("greedy", "the number of engines must be a whole number"),
        ("greedy=-1", "the number of engines must be a whole number"),
        ("greedy=1,greedy=2", "greedy occurs twice"),
        ("speculative=600,greedy=401", "a fleet may have at most 1000 engines"),
        pytest.param(f"greedy={'9' * 5000}", "a whole number from 0 to 1000", id="number of 5,000 digits"),
        ("greedy=0,speculative=0", "the fleet has no engine"),
    ],
)
def test_an_impossible_fleet_is_refused(text: str, message: str) -> None:
    with pytest.raises(FleetError, match=message):
        parse_fleet(text)
