"""The results in the paper's Tables 1, 2 and 3, and the workloads and engines with which its runs are simulated.

The methods are A (greedy), B (always speculative) and C (DPS). D and E, which use other engines, are not simulated.
"""

import random
from typing import Final, Literal

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Policy
from dps_gateway.routing.policies import AlwaysGreedy, AlwaysSpeculative, DeltaPrefill
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.run import Load, Scenario
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import load_workload, toolbench_trace

Benchmark = Literal["ToolBench", "BFCL"]
BENCHMARKS: Final[tuple[Benchmark, ...]] = ("ToolBench", "BFCL")
Method = Literal["Greedy", "Always-Spec", "DPS"]

TABLE_1: Final[dict[tuple[Benchmark, Method], tuple[float, float, float]]] = {
    ("ToolBench", "Greedy"): (3.613, 7.338, 148.7),
    ("ToolBench", "Always-Spec"): (2.790, 5.475, 197.0),
    ("ToolBench", "DPS"): (2.806, 5.379, 196.3),
    ("BFCL", "Greedy"): (0.901, 2.175, 107.2),
    ("BFCL", "Always-Spec"): (0.733, 1.593, 136.2),
    ("BFCL", "DPS"): (0.712, 1.557, 140.3),
}
"""Sequential runs: median and p95 of the session latency (s), and tokens per second."""

TABLE_1_THRESHOLD: Final = 8192
"""τ* of the sequential runs (section 4.2)."""

CONCURRENCIES: Final = (1, 4, 8)

TABLE_2: Final[dict[tuple[Benchmark, Method], tuple[float, float, float]]] = {
    ("ToolBench", "DPS"): (627.4, 168.4, 95.0),
    ("ToolBench", "Always-Spec"): (492.2, 470.4, 469.1),
    ("ToolBench", "Greedy"): (610.4, 168.8, 94.4),
    ("BFCL", "DPS"): (919.0, 614.4, 607.7),
    ("BFCL", "Always-Spec"): (838.0, 845.0, 847.5),
    ("BFCL", "Greedy"): (1060.5, 330.6, 200.9),
}
"""Seconds for the whole batch at each of CONCURRENCIES, with τ = 128."""

TABLE_2_THRESHOLD: Final = 128

TABLE_3: Final[dict[int | None, tuple[float, float, float, float]]] = {
    0: (3.667, 7.262, 149.1, 0.0),
    32: (3.598, 7.259, 149.7, 0.0),
    64: (3.602, 7.261, 149.7, 0.2),
    128: (3.529, 7.256, 150.2, 1.9),
    256: (3.370, 6.779, 159.8, 30.9),
    384: (3.272, 6.535, 164.5, 41.9),
    512: (3.210, 6.510, 168.0, 53.0),
    768: (3.072, 5.797, 182.2, 68.4),
    1024: (3.024, 5.643, 185.8, 75.7),
    1536: (2.942, 5.611, 189.6, 86.5),
    2048: (2.916, 5.453, 192.5, 94.4),
    4096: (2.860, 5.377, 195.5, 100.0),
    None: (2.865, 5.391, 195.9, 100.0),
}
"""ToolBench by τ: median and p95 of the session latency (s), tokens/s, speculative turns (%).

With τ = None every turn is speculative.
"""

_BFCL_OUTPUT_TOKENS: Final = 25.2
"""Mean answer length: Table 1's tokens/s times Table 2's seconds at c = 1, divided by 4,522 turns."""

_BFCL_REPEATED: Final = {6: 172, 7: 22}
"""By number of turns: how many sessions of that length are repeated, to reach the paper's 994 sessions and 4,522 turns.

The paper used BFCL V3, whose 200 composite sessions V4 does not have.
"""


def benchmark_sessions(benchmark: Benchmark) -> list[SessionTrace]:
    """The sessions that represent a benchmark of the paper, with its numbers of sessions and turns."""
    return toolbench_trace() if benchmark == "ToolBench" else _bfcl_sessions()


def scenario(method: Method, concurrency: int, threshold: int | None) -> Scenario:
    """The scenario of one of the paper's runs: one engine for A and B, two engines with a common cache for C.

    Speculation is serialized.
    """
    methods: dict[Method, tuple[int, int, Policy]] = {
        "Greedy": (0, 1, AlwaysGreedy()),
        "Always-Spec": (1, 0, AlwaysSpeculative()),
        "DPS": (1, 1, DeltaPrefill(threshold)),
    }
    speculative, greedy, policy = methods[method]
    engines = {Pool.SPECULATIVE: speculative, Pool.GREEDY: greedy}
    return Scenario(FleetSpec(engines, cache="common", serialized=True), policy, Load(concurrency))


def _bfcl_sessions() -> list[SessionTrace]:
    sessions = load_workload("bfcl")
    turns = sum(len(session.turns) for session in sessions)
    scale = _BFCL_OUTPUT_TOKENS * turns / sum(session.output_tokens for session in sessions)
    rng = random.Random(0)
    repeated = [
        again.model_copy(update={"id": f"{again.id}_repeated_{length}_{number}"})
        for length, count in _BFCL_REPEATED.items()
        for number, again in enumerate(
            rng.choices([session for session in sessions if len(session.turns) == length], k=count)
        )
    ]
    every = [_with_outputs_scaled(session, scale) for session in [*sessions, *repeated]]
    rng.shuffle(every)
    return every


def _with_outputs_scaled(session: SessionTrace, scale: float) -> SessionTrace:
    turns = [
        turn.model_copy(update={"output_tokens": max(1, round(turn.output_tokens * scale))})
        for turn in session.turns
    ]
    return session.model_copy(update={"turns": turns})
