"""Simulates section 4.4 of the paper except Table 3, and the rows D and E of Table 1. This module performs no I/O.

Table 4 is the L-switch ablation, table 5 the distributions of ΔL and L, and table 6 the other engines. Method D is
Transformers with a draft model and a confidence threshold, method E vLLM with suffix decoding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import AlwaysSpeculative, TotalLength
from dps_lab.paper.published import BENCHMARKS, TABLE_1_THRESHOLD, Benchmark, scenario
from dps_lab.paper.value import PaperValue, Progress, Role, sequential_columns
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.prompts import plan_sessions
from dps_lab.simulate.report import Report, summarize
from dps_lab.simulate.roofline import FITTED, FITTED_ACCEPTANCE, SUFFIX, Efficiency
from dps_lab.simulate.run import Load, Scenario, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace
from dps_local.emulated_sglang.time_model import Speculation

OtherMethod = Literal["D: Transformers", "E: vLLM"]

L_SWITCH_THRESHOLD: Final = 6144
L_SWITCH: Final = (2.842, 99.7)
"""τ_L* of the L-switch ablation; its median session latency (s) and its speculative turns (%)."""

L_SWITCH_DPS: Final = 2.886
"""Median session latency (s) of DPS in the same comparison."""

LENGTHS: Final = {"ΔL": (58, 4026), "L": (808, 8192)}
"""Shortest and longest on ToolBench, in tokens."""

SIZES: Final[dict[Benchmark, tuple[int, int]]] = {"ToolBench": (150, 592), "BFCL": (994, 4522)}
"""Sessions and turns."""

TABLE_1_OTHERS: Final[dict[tuple[Benchmark, OtherMethod], tuple[float, float, float]]] = {
    ("ToolBench", "D: Transformers"): (18.928, 36.363, 29.8),
    ("ToolBench", "E: vLLM"): (4.455, 8.895, 123.6),
    ("BFCL", "D: Transformers"): (7.752, 15.246, 13.6),
    ("BFCL", "E: vLLM"): (1.106, 2.702, 87.0),
}
"""Sequential runs on other engines: median and p95 of the session latency (s), and tokens per second."""

TRANSFER_THRESHOLD: Final = 256
TRANSFER_GAP: Final = 3.03
"""τ* on vLLM, and by how much τ* of SGLang increases the median session latency there (%)."""

_VLLM_PASS_SECONDS: Final = 0.0053

_GREEDY_PASSES: Final[tuple[tuple[float, Role], ...]] = (
    (_VLLM_PASS_SECONDS, "predicted"),
    (0.0022, "fitted"),
)
"""Fixed costs of a pass of greedy vLLM, for which the paper reports no latencies.

The first is that of method E, the second was chosen from the transfer gap itself.
"""

FURTHER_RUNS: Final = 1 + len(TABLE_1_OTHERS) + 2 * len(_GREEDY_PASSES)


@dataclass(frozen=True)
class OtherEngine:
    """The time model of another engine. `fitted` are the values from which its pass time was chosen."""

    efficiency: Efficiency
    speculation: Speculation
    prefix_cache: bool
    fitted: frozenset[tuple[Benchmark, str]]


OTHER_ENGINES: Final[dict[OtherMethod, OtherEngine]] = {
    # Eager PyTorch: launching the kernels of a pass takes longer than running them, even for the draft model. No KV
    # cache is kept between requests.
    "D: Transformers": OtherEngine(
        efficiency=replace(FITTED, pass_seconds=0.024, draft_pass_seconds=0.024),
        speculation=Speculation("STANDALONE", 3, 1, 4, 0.0, FITTED_ACCEPTANCE),
        prefix_cache=False,
        fitted=frozenset({("ToolBench", "Med (s)")}),
    ),
    # Drafts come from a suffix tree on the CPU, between the passes.
    "E: vLLM": OtherEngine(
        efficiency=replace(FITTED, pass_seconds=_VLLM_PASS_SECONDS),
        speculation=SUFFIX,
        prefix_cache=True,
        fitted=frozenset({("ToolBench", "Med (s)"), ("BFCL", "Med (s)")}),
    ),
}


def further_results(
    sessions: Mapping[Benchmark, Sequence[SessionTrace]], dps: Report, progress: Progress
) -> Iterator[PaperValue]:
    """The values of the tables 4 to 6. `dps` is the sequential run of DPS on ToolBench."""
    yield from _l_switch(sessions["ToolBench"], dps, progress)
    yield from _distributions(sessions)
    yield from _other_engines(sessions, progress)
    yield from _transfer(sessions["ToolBench"], progress)


def _l_switch(sessions: Sequence[SessionTrace], dps: Report, progress: Progress) -> Iterator[PaperValue]:
    progress(f"ToolBench, L-switch, c = 1, τ = {L_SWITCH_THRESHOLD}")
    chosen = replace(scenario("DPS", 1, None), policy=TotalLength(L_SWITCH_THRESHOLD))
    report = summarize(simulate(sessions, chosen), chosen.fleet.gpus, 0.0)
    median, share = L_SWITCH
    row = f"L-switch, τ = {L_SWITCH_THRESHOLD}"
    yield PaperValue(4, row, "Med (s)", median, report.session_seconds.median, "predicted")
    yield PaperValue(4, row, "Spec %", share, 100 * report.speculative_share, "predicted")
    yield PaperValue(
        4, f"DPS, τ = {TABLE_1_THRESHOLD}", "Med (s)", L_SWITCH_DPS, dps.session_seconds.median, "predicted"
    )


def turn_lengths(sessions: Sequence[SessionTrace]) -> dict[str, list[int]]:
    """ΔL and L of every turn of a workload, in tokens, sorted."""
    turns = [turn for session in plan_sessions(sessions) for turn in session.turns()]
    return {
        "ΔL": sorted(turn.delta_tokens for turn in turns),
        "L": sorted(len(turn.prompt) for turn in turns),
    }


def _distributions(sessions: Mapping[Benchmark, Sequence[SessionTrace]]) -> Iterator[PaperValue]:
    for name, (shortest, longest) in LENGTHS.items():
        values = turn_lengths(sessions["ToolBench"])[name]
        yield PaperValue(5, f"ToolBench, {name}", "shortest", shortest, values[0], "constructed")
        yield PaperValue(5, f"ToolBench, {name}", "longest", longest, values[-1], "constructed")
    for benchmark in BENCHMARKS:
        count, turns = SIZES[benchmark]
        found = sum(len(session.turns) for session in sessions[benchmark])
        yield PaperValue(5, benchmark, "sessions", count, len(sessions[benchmark]), "constructed")
        yield PaperValue(5, benchmark, "turns", turns, found, "constructed")


def _other_engines(
    sessions: Mapping[Benchmark, Sequence[SessionTrace]], progress: Progress
) -> Iterator[PaperValue]:
    for (benchmark, method), values in TABLE_1_OTHERS.items():
        progress(f"{benchmark}, {method}, c = 1")
        report = _run_other(sessions[benchmark], method)
        for column, paper, simulated in sequential_columns(values, report):
            fitted = (benchmark, column) in OTHER_ENGINES[method].fitted
            role: Role = "fitted" if fitted else "predicted"
            yield PaperValue(6, f"{benchmark}, {method}", column, paper, simulated, role)


def _run_other(sessions: Sequence[SessionTrace], method: OtherMethod) -> Report:
    engine = OTHER_ENGINES[method]
    chosen = Scenario(
        FleetSpec(
            {Pool.SPECULATIVE: 1, Pool.GREEDY: 0},
            serialized=True,
            speculation=engine.speculation,
            efficiency=engine.efficiency,
        ),
        AlwaysSpeculative(),
        Load(concurrency=1),
    )
    if engine.prefix_cache:
        return summarize(simulate(sessions, chosen), chosen.fleet.gpus, 0.0)
    return summarize(without_prefix_cache(sessions, chosen), chosen.fleet.gpus, 0.0)


def without_prefix_cache(sessions: Sequence[SessionTrace], chosen: Scenario) -> list[TurnResult]:
    """Simulate every turn as a separate session, so that no prefix is cached, and join the results."""
    owner = {
        f"{session.id}/{index}": session.id for session in sessions for index in range(len(session.turns))
    }
    turns = [
        SessionTrace(id=f"{session.id}/{index}", turns=[turn])
        for session in sessions
        for index, turn in enumerate(session.turns)
    ]
    return [replace(result, session=owner[result.session]) for result in simulate(turns, chosen)]


def _transfer(sessions: Sequence[SessionTrace], progress: Progress) -> Iterator[PaperValue]:
    """The transfer gap for two costs of greedy vLLM's passes: that of suffix decoding, and a fitted one."""
    engine = OTHER_ENGINES["E: vLLM"]
    for pass_seconds, role in _GREEDY_PASSES:
        greedy = replace(engine.efficiency, pass_seconds=pass_seconds)
        label = f"greedy pass + {1000 * pass_seconds:.1f} ms"
        medians = []
        for threshold in (TABLE_1_THRESHOLD, TRANSFER_THRESHOLD):
            progress(f"ToolBench, DPS on vLLM, c = 1, {label}, τ = {threshold}")
            chosen = scenario("DPS", 1, threshold)
            fleet = replace(
                chosen.fleet,
                speculation=engine.speculation,
                efficiency=engine.efficiency,
                greedy_efficiency=greedy,
            )
            results = simulate(sessions, replace(chosen, fleet=fleet))
            medians.append(summarize(results, fleet.gpus, 0.0).session_seconds.median)
        gap = 100 * (medians[0] / medians[1] - 1)
        row = f"ToolBench, DPS on vLLM, τ = {TABLE_1_THRESHOLD} against {TRANSFER_THRESHOLD}, {label}"
        yield PaperValue(6, row, "Med, gap %", TRANSFER_GAP, gap, role)
