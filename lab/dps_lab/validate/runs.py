"""The runs that are compared, and their simulation. This module performs no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import policy_named
from dps_lab.replay.records import ReplayResult
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.report import Report, summarize
from dps_lab.simulate.run import Change, Load, Scenario, simulate
from dps_lab.simulate.trace import SessionTrace, TurnLengths
from dps_local.emulated_sglang.storage import TOKENS_PER_SECOND
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS

THRESHOLD_TOKENS: Final = 128
_HARDWARE: Final = HARDWARE["a100-7b"]


@dataclass(frozen=True)
class ValidationRun:
    """A run on one speculative and one greedy engine. sessions: how many of the workload."""

    workload: Literal["bfcl", "toolbench"]
    policy: str
    cache: Literal["separate", "common"]
    concurrency: int
    sessions: int


RUNS: Final = (
    ValidationRun("bfcl", "DeltaPrefill", "separate", 1, 12),
    ValidationRun("bfcl", "DeltaPrefill", "common", 4, 32),
    ValidationRun("bfcl", "DeltaPrefill", "separate", 8, 40),
    ValidationRun("bfcl", "DeltaPrefill", "common", 8, 40),
    ValidationRun("bfcl", "Adaptive", "common", 8, 40),
    ValidationRun("toolbench", "DeltaPrefill", "common", 4, 16),
    ValidationRun("toolbench", "Adaptive", "separate", 8, 32),
    ValidationRun("bfcl", "AlwaysGreedy", "separate", 4, 32),
    ValidationRun("bfcl", "AlwaysSpeculative", "separate", 4, 32),
    ValidationRun("toolbench", "AlwaysGreedy", "separate", 4, 16),
    ValidationRun("toolbench", "AlwaysSpeculative", "separate", 4, 16),
)


def lengths(result: ReplayResult) -> list[SessionTrace]:
    """The sessions of a replay as a trace, with the token counts that the engines reported."""
    traces = []
    for session, records in sorted(result.by_session().items(), key=lambda item: item[1][0].started):
        turns = [
            TurnLengths(
                prompt_tokens=record.usage.prompt_tokens, output_tokens=record.usage.completion_tokens
            )
            for record in sorted(records, key=lambda record: record.turn)
        ]
        traces.append(SessionTrace(id=session, turns=turns))
    return traces


def simulated(
    run: ValidationRun,
    traces: Sequence[SessionTrace],
    first_prompts: Mapping[str, tuple[int, ...]],
    speed: float,
) -> Report:
    """The same run in simulation. Times are in real seconds, at `speed` emulated seconds per real second.

    The gateway and the transport do not become slower with the engines, so real seconds are simulated.
    first_prompts: the tokens of the sessions' first prompts, of which sessions have prefixes in common.
    """
    bytes_per_second = TOKENS_PER_SECOND * _HARDWARE.target.kv_bytes_per_token
    fleet = FleetSpec(
        engines={Pool.SPECULATIVE: 1, Pool.GREEDY: 1},
        cache=run.cache,
        hardware=_HARDWARE,
        speculation=SPECULATION_DEFAULTS["STANDALONE"],
        transfer_bytes_per_second=bytes_per_second * speed,
        emulated=True,
    )
    scenario = Scenario(
        fleet,
        policy_named(run.policy, THRESHOLD_TOKENS),
        Load(run.concurrency),
        changes=tuple(Change(0.0, pool=pool, slowdown=1 / speed) for pool in Pool),
    )
    return summarize(simulate(traces, scenario, first_prompts), fleet.gpus, regret=0.0)


def scaled(report: Report, factor: float) -> Report:
    """The report with its batch time and session latencies multiplied by a factor."""
    sessions = replace(
        report.session_seconds,
        median=factor * report.session_seconds.median,
        p95=factor * report.session_seconds.p95,
    )
    return replace(report, batch_seconds=factor * report.batch_seconds, session_seconds=sessions)
