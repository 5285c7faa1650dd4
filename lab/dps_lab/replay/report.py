"""Statistics of a replay, and its comparison with the oracle. This module performs no I/O."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dps_lab.replay.oracle import Decision
from dps_lab.replay.records import ReplayResult, TurnRecord


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of a distribution, in the unit of its values."""

    count: int
    minimum: float
    p25: float
    median: float
    p75: float
    p95: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quantiles | None":
        """The quantiles by linear interpolation, or None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        cuts = statistics.quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
        return cls(len(ordered), ordered[0], cuts[24], cuts[49], cuts[74], cuts[94], ordered[-1])


@dataclass(frozen=True)
class Summary:
    """Statistics of a replay. Times are in seconds, lengths in tokens.

    lost: planned turns without a complete answer.
    retries: attempts after the first one of each turn.
    routes: number of turns by pool and reason.
    session_latency: sum of the latencies of a session's turns, without think time; completely answered sessions
    only.
    tokens_per_second: completion tokens of all sessions divided by the wall time.
    cached_share: cached prompt tokens divided by prompt tokens, as reported by the engine.
    """

    label: str
    sessions: int
    turns: int
    lost: int
    retries: int
    wall_seconds: float
    routes: Mapping[tuple[str, str], int]
    histories: Mapping[str, int]
    states: Mapping[str, int]
    delta_tokens: Quantiles | None
    prompt_tokens: Quantiles | None
    session_latency: Quantiles | None
    ttft: Quantiles | None
    completion_tokens: int
    tokens_per_second: float
    cached_share: float

    @property
    def speculative_share(self) -> float:
        """Share of the routed turns that went to the speculative pool: Table 3's `Spec %` as a fraction."""
        decided = sum(self.routes.values())
        speculative = sum(count for (pool, _), count in self.routes.items() if pool == "speculative")
        return speculative / decided if decided else 0.0


def summarize(result: ReplayResult, time_scale: float = 1.0) -> Summary:
    """The statistics of a replay. time_scale: emulated seconds per real second; times are in emulated seconds."""
    answered = [record for record in result.turns if record.error is None]
    sessions = result.by_session()
    complete = [records for records in sessions.values() if all(record.error is None for record in records)]
    completion = sum(record.usage.completion_tokens for record in answered)
    prompt = sum(record.usage.prompt_tokens for record in answered)
    wall = result.wall_seconds * time_scale
    verdicts = [record.verdict for record in result.turns]

    def scaled(values: Iterable[float | None]) -> Quantiles | None:
        return Quantiles.of(value * time_scale for value in values if value is not None)

    return Summary(
        label=result.label,
        sessions=len(sessions),
        turns=result.planned_turns,
        lost=result.planned_turns - len(answered),
        retries=sum(record.attempts - 1 for record in result.turns),
        wall_seconds=wall,
        routes=Counter((v.pool, v.reason or "-") for v in verdicts if v.pool is not None),
        histories=Counter(v.history for v in verdicts if v.history is not None),
        states=Counter(v.state for v in verdicts if v.state is not None),
        delta_tokens=Quantiles.of(v.delta_tokens for v in verdicts if v.delta_tokens is not None),
        prompt_tokens=Quantiles.of(v.prompt_tokens for v in verdicts if v.prompt_tokens is not None),
        session_latency=scaled(sum(record.latency for record in records) for records in complete),
        ttft=scaled(record.ttft for record in answered),
        completion_tokens=completion,
        tokens_per_second=completion / wall if wall else 0.0,
        cached_share=sum(record.usage.cached_tokens for record in answered) / prompt if prompt else 0.0,
    )


@dataclass(frozen=True)
class Comparison:
    """A replay's decisions compared with the oracle's.

    same: number of turns with the expected decision.
    repeated: turns with ΔL = 0 because an earlier attempt failed after it was committed but before its headers
    arrived. That is the correct decision for a retry of the same turn.
    differing: all other turns.
    """

    same: int
    repeated: Sequence[tuple[TurnRecord, Decision]]
    differing: Sequence[tuple[TurnRecord, Decision]]


def compare(turns: Iterable[TurnRecord], expected: Mapping[str, Sequence[Decision]]) -> Comparison:
    """Compare pool, ΔL, L and number of every turn with the oracle's. Turns without a decision are skipped."""
    same = 0
    repeated: list[tuple[TurnRecord, Decision]] = []
    differing: list[tuple[TurnRecord, Decision]] = []
    for record in turns:
        verdict, expectation = record.verdict, expected[record.session][record.turn - 1]
        if verdict.pool is None:
            continue
        if (verdict.pool, verdict.delta_tokens, verdict.prompt_tokens, verdict.turn) == (
            expectation.pool,
            expectation.delta_tokens,
            expectation.prompt_tokens,
            expectation.turn,
        ):
            same += 1
        elif record.unacknowledged and (verdict.delta_tokens, verdict.prompt_tokens) == (
            0,
            expectation.prompt_tokens,
        ):
            repeated.append((record, expectation))
        else:
            differing.append((record, expectation))
    return Comparison(same, repeated, differing)
