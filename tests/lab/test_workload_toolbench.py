"""The ToolBench-shaped workload has the paper's lengths."""

from hypothesis import given
from hypothesis import strategies as st

from dps_lab.workload.toolbench import toolbench_shaped

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
