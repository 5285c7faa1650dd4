"""Engines whose draft length depends on the batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import AlwaysSpeculative
from dps_lab.simulate.adaptive_drafts import (
    SGLANG_STEPS,
    AdaptiveEngine,
    StepsByBatch,
    acceptance_probability,
    adapted,
    expected_tokens,
    vllm_steps,
    with_steps,
)
from dps_lab.simulate.fleet import FleetSpec, build_engines
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.roofline import EngineTiming, speculation
from dps_lab.simulate.run import Load, Scenario, simulate
from dps_lab.simulate.trace import SessionTrace, TurnLengths

BASE = speculation("STANDALONE")
TIMING = EngineTiming(HARDWARE["a100-7b"], BASE)


@given(st.floats(1.0, 4.0))
def test_probability_of_acceptance_yields_the_acceptance_length(length: float) -> None:
    base = speculation("STANDALONE", length)
    assert expected_tokens(acceptance_probability(base), base.steps) == pytest.approx(length)


def test_the_default_number_of_steps_has_the_default_acceptance_length() -> None:
    same = with_steps(BASE, BASE.steps)
    assert same is not None
    assert same.draft_tokens == BASE.draft_tokens
    assert same.acceptance_length == pytest.approx(BASE.acceptance_length)


def test_more_steps_accept_more_tokens_and_no_steps_are_greedy() -> None:
    lengths = [each.acceptance_length for steps in (1, 3, 5, 7) if (each := with_steps(BASE, steps))]
    assert lengths == sorted(lengths)
    assert all(length <= steps + 1 for length, steps in zip(lengths, (1, 3, 5, 7), strict=True))
    assert with_steps(BASE, 0) is None


@given(st.integers(1, 200), st.floats(1.0, 4.0))
def test_the_draft_length_is_one_of_those_for_the_batch(batch: int, length: float) -> None:
    chosen = adapted(TIMING, speculation("STANDALONE", length), SGLANG_STEPS, batch, batch * 1000)
    allowed = SGLANG_STEPS[max(smallest for smallest in SGLANG_STEPS if smallest <= batch)]
    assert (0 if chosen is None else chosen.steps) in allowed


def test_drafts_that_are_never_accepted_are_as_short_as_possible() -> None:
    useless = speculation("STANDALONE", 1.0)
    single = adapted(TIMING, useless, SGLANG_STEPS, 1, 1000)
    assert single is not None
    assert single.steps == 1
    assert adapted(TIMING, useless, SGLANG_STEPS, 8, 8000) is None


def test_drafts_that_are_always_accepted_are_as_long_as_possible() -> None:
    perfect = speculation("STANDALONE", 4.0)
    chosen = adapted(TIMING, perfect, SGLANG_STEPS, 1, 1000)
    assert chosen is not None
    assert chosen.steps == 7


@pytest.mark.parametrize(
    ("batch", "steps"), [(1, 4), (2, 4), (3, 1), (8, 1), (12, 1), (16, 0), (32, 0), (100, 0)]
)
def test_vllm_has_one_number_of_steps_for_each_batch(batch: int, steps: int) -> None:
    schedule = vllm_steps([(16, 32, 0), (1, 2, 4), (3, 8, 1)])
    assert adapted(TIMING, BASE, schedule, batch, batch * 1000) == with_steps(BASE, steps)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], "begin at a batch size of 1"),
        ([(2, 8, 1)], "begin at a batch size of 1"),
        ([(1, 8, -1)], "not be negative"),
        ([(1, 8, 3), (12, 9, 1)], "not end before it begins"),
        ([(1, 8, 3), (8, 16, 1)], "not overlap"),
    ],
)
def test_schedule_that_vllm_refuses_is_refused(schedule: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm_steps(schedule)


def fleet(speculative: int, adaptive: int, greedy: int = 0, steps: StepsByBatch = SGLANG_STEPS) -> FleetSpec:
    return FleetSpec(
        {Pool.SPECULATIVE: speculative, Pool.GREEDY: greedy}, adaptive=adaptive, steps_by_batch=steps
    )


def batch_seconds(spec: FleetSpec, concurrency: int) -> float:
    """The time for 60 sessions of one long answer."""
    sessions = [
        SessionTrace(id=f"s{number}", turns=[TurnLengths(prompt_tokens=100, output_tokens=120)])
        for number in range(60)
    ]
    results = simulate(sessions, Scenario(spec, AlwaysSpeculative(), Load(concurrency)))
    assert all(result.output_tokens == 120 for result in results)
    return max(result.finished for result in results)


def test_only_the_adaptive_engines_of_a_fleet_adapt() -> None:
    kinds = [type(engine).__name__ for group in build_engines(fleet(3, 2, 1)) for engine in group]
    assert kinds == ["AdaptiveEngine", "AdaptiveEngine", "VirtualEngine", "VirtualEngine"]


@pytest.mark.parametrize("concurrency", [1, 40])
def test_an_adaptive_engine_is_at_least_as_fast_as_one_with_a_fixed_draft_length(concurrency: int) -> None:
    assert batch_seconds(fleet(1, 1), concurrency) <= batch_seconds(fleet(1, 0), concurrency) * 1.02


@pytest.mark.parametrize("concurrency", [1, 40])
def test_schedule_with_the_default_steps_for_every_batch_is_like_a_fixed_draft_length(
    concurrency: int,
) -> None:
    fixed = fleet(1, 1, steps=vllm_steps([(1, 1, BASE.steps)]))
    assert batch_seconds(fixed, concurrency) == pytest.approx(batch_seconds(fleet(1, 0), concurrency))


def test_schedule_without_draft_tokens_is_greedy_decoding() -> None:
    timing = build_engines(fleet(1, 1, steps=vllm_steps([(1, 256, 0)])))[0][0].timing
    greedy = build_engines(fleet(0, 0, greedy=1))[0][0].timing
    assert timing.decode_seconds(4, 4000) == greedy.decode_seconds(4, 4000)


def test_a_change_of_the_acceptance_length_changes_the_draft_length() -> None:
    [[engine]] = build_engines(fleet(1, 1))
    assert isinstance(engine, AdaptiveEngine)
    assert engine.timing.adapted(8, 8000) is not None
    engine.change(slowdown=None, acceptance_length=1.0)
    assert engine.timing.adapted(8, 8000) is None
