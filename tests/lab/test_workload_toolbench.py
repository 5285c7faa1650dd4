"""The ToolBench-shaped workload has the paper's lengths."""

import random

from hypothesis import given
from hypothesis import strategies as st

from dps_lab.replay.oracle import PromptCounter, expected_decisions
from dps_lab.workload.toolbench import text_of, toolbench_sessions, toolbench_shaped

TABLE_3 = {  # τ: Spec %
    0: 0.0,
    32: 0.0,
    64: 0.2,
    128: 1.9,
    256: 30.9,
    384: 41.9,
    512: 53.0,
    768: 68.4,
    1024: 75.7,
    1536: 86.5,
    2048: 94.4,
    4096: 100.0,
}


@given(st.integers())
def test_workload_of_every_seed_has_the_papers_counts_and_distribution(seed: int) -> None:
    sessions = toolbench_shaped(seed)
    deltas = [delta for session in sessions for delta in session]
    lengths = [sum(session[:turn]) for session in sessions for turn in range(1, len(session) + 1)]
    assert {
        "sessions": len(sessions),
        "turns": len(deltas),
        "delta": (min(deltas), max(deltas)),
        "length": (min(lengths), max(lengths)),
        "spec": {tau: round(100 * sum(delta <= tau for delta in deltas) / 592, 1) for tau in TABLE_3},
    } == {"sessions": 150, "turns": 592, "delta": (58, 4026), "length": (808, 8192), "spec": TABLE_3}
    assert all(len(session) > 1 for session in sessions)


def test_lengths_are_determined_by_the_seed() -> None:
    assert toolbench_shaped(1) == toolbench_shaped(1) != toolbench_shaped(2)


@given(tokens=st.integers(0, 400), seed=st.integers(0, 9))
def test_text_has_exactly_the_requested_tokens(counter: PromptCounter, tokens: int, seed: int) -> None:
    assert counter.text_tokens(text_of(tokens, counter, random.Random(seed))) == tokens


def test_prompts_have_exactly_the_generated_lengths(counter: PromptCounter) -> None:
    sessions = toolbench_sessions(counter, seed=3)
    assert [
        [decision.delta_tokens for decision in expected_decisions(session, counter)]
        for session in sessions[:20]
    ] == toolbench_shaped(3)[:20]
