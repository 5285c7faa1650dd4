"""What a replay's records say, in figures. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dps_lab.replay.oracle import Decision
from dps_lab.replay.records import ReplayResult, TurnRecord


@dataclass(frozen=True)
class Quantiles:
    """A distribution in seven numbers, in the unit of what was measured."""

    count: int
    minimum: float
    p25: float
    median: float
    p75: float
    p95: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quantiles | None":
        """Quantiles by linear interpolation; None of no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        cuts = statistics.quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
        return cls(len(ordered), ordered[0], cuts[24], cuts[49], cuts[74], cuts[94], ordered[-1])


@dataclass(frozen=True)
class Summary:
    """A replay in figures. Times in seconds, lengths in tokens.

    lost: turns that were planned and have no whole answer. retries: attempts beyond each turn's first.
    session_latency: of sessions all of whose turns were answered, the sum of their turns' latencies, without
    think time. tokens_per_second: completion tokens of all sessions by wall time.
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
    turn_latency: Quantiles | None
    ttft: Quantiles | None
    completion_tokens: int
    tokens_per_second: float
    cached_share: float

    @property
    def speculative_share(self) -> float:
        """Share of the decided turns that went to the speculative pool: Table 3's `Spec %`, as a fraction."""
        decided = sum(self.routes.values())
        speculative = sum(count for (pool, _), count in self.routes.items() if pool == "speculative")
        return speculative / decided if decided else 0.0


def summarize(result: ReplayResult, time_scale: float = 1.0) -> Summary:
    """The figures of a replay.

    time_scale: by how much the emulated hardware ran faster than its clock; times are told in its seconds.
    """
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
        turn_latency=scaled(record.latency for record in answered),
        ttft=scaled(record.ttft for record in answered),
        completion_tokens=completion,
        tokens_per_second=completion / wall if wall else 0.0,
        cached_share=sum(record.usage.cached_tokens for record in answered) / prompt if prompt else 0.0,
    )


@dataclass(frozen=True)
class Comparison:
    """The turns of a replay beside what an undisturbed gateway decides for them.

    repeated: turns whose first visible decision was made for a repetition, because an earlier attempt had
    broken before its headers arrived, yet after the turn was committed. ΔL = 0 is right then, and it was.
    """

    same: int
    repeated: Sequence[tuple[TurnRecord, Decision]]
    differing: Sequence[tuple[TurnRecord, Decision]]


def compare(turns: Iterable[TurnRecord], expected: Mapping[str, Sequence[Decision]]) -> Comparison:
    """Every turn's (pool, ΔL, L, turn) beside the oracle's; turns that got no decision are left out."""
    same = 0
    repeated: list[tuple[TurnRecord, Decision]] = []
    differing: list[tuple[TurnRecord, Decision]] = []
    for record in turns:
        verdict, truth = record.verdict, expected[record.session][record.turn - 1]
        if verdict.pool is None:
            continue
        if (verdict.pool, verdict.delta_tokens, verdict.prompt_tokens, verdict.turn) == (
            truth.pool,
            truth.delta_tokens,
            truth.prompt_tokens,
            truth.turn,
        ):
            same += 1
        elif record.blind and (verdict.delta_tokens, verdict.prompt_tokens) == (0, truth.prompt_tokens):
            repeated.append((record, truth))
        else:
            differing.append((record, truth))
    return Comparison(same, repeated, differing)
