"""Engines whose draft length depends on the batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_lab.simulate.adaptive_drafts import (
    SGLANG_STEPS,
    StepsByBatch,
    acceptance_probability,
    adapted,
    expected_tokens,
    vllm_steps,
)
from dps_lab.simulate.fleet import FleetSpec, build_engines
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.prompts import PlannedTurn
from dps_lab.simulate.roofline import EngineTiming, speculation
from dps_local.emulated_sglang.time_model import Speculation

BASE = speculation("STANDALONE")
TIMING = EngineTiming(HARDWARE["a100-7b"], BASE)


def choose(schedule: StepsByBatch, batch: int, length: float = BASE.acceptance_length) -> Speculation | None:
    """The draft length for a batch of requests with the same mean number of tokens per verification."""
    base = speculation("STANDALONE", length)
    return adapted(TIMING, base, schedule, {acceptance_probability(base): batch}, batch * 1000)


@given(st.integers(1, 200), st.floats(1.0, 4.0))
def test_the_draft_length_is_one_of_those_for_the_batch(batch: int, length: float) -> None:
    chosen = choose(SGLANG_STEPS, batch, length)
    allowed = SGLANG_STEPS[max(smallest for smallest in SGLANG_STEPS if smallest <= batch)]
    assert (0 if chosen is None else chosen.steps) in allowed


def test_drafts_are_as_long_as_the_acceptance_of_most_requests_of_the_batch_suggests() -> None:
    steps = []
    for mixture in ({0.1: 6, 0.95: 1}, {0.1: 1, 0.95: 6}):
        chosen = adapted(TIMING, BASE, SGLANG_STEPS, mixture, 7_000)
        assert chosen is not None
        steps.append(chosen.steps)
    assert steps == [1, 7]


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


@pytest.mark.parametrize("adaptive", [0, 1], ids=["fixed drafts", "adaptive drafts"])
@pytest.mark.parametrize("probability", [0.0, 0.35, 0.85, 1.0])
def test_answers_take_the_verifications_that_the_acceptance_of_the_session_implies(
    probability: float, adaptive: int
) -> None:
    """A single request has 3 draft tokens, and with adaptive drafts the number that its acceptance suggests."""
    fleet = FleetSpec({Pool.SPECULATIVE: 1}, adaptive=adaptive, steps_by_batch=SGLANG_STEPS)
    ((engine,),) = build_engines(fleet)
    turn = PlannedTurn((1, 0), (2,) + (0,) * 5999, 0, 0.0, probability)
    sequence = engine.sequence("r", turn, 0.0)
    engine.submit(sequence)
    while step := engine.next_step(0.0):
        engine.scheduler.complete(step, 0.0)
    chosen = adapted(TIMING, BASE, SGLANG_STEPS, {probability: 1}, 3_000) if adaptive else BASE
    assert chosen is not None
    expected = expected_tokens(probability, chosen.steps)
    assert sequence.generated / sequence.verify_steps == pytest.approx(expected, rel=0.03)
    assert sum(sequence.accepted) == sequence.verify_steps
