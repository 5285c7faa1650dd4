"""Statistics of a replay, their tables for a terminal, and the comparison with the oracle."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from dps_lab.quantiles import quantile
from dps_lab.replay.oracle import Decision
from dps_lab.replay.records import ReplayResult, TurnRecord

QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True)
class Summary:
    """Statistics of a replay. Times are in seconds, lengths in tokens; both are sorted.

    lost: planned turns without a complete answer.
    retries: attempts after the first one of each turn.
    routes: number of turns by pool and reason.
    session_seconds: sum of the latencies of a session's turns, without think time; completely answered sessions
    only.
    tokens_per_second: completion tokens of all sessions divided by the wall time.
    cached_share: cached prompt tokens divided by prompt tokens, as reported by the engine.
    """

    sessions: int
    turns: int
    lost: int
    retries: int
    wall_seconds: float
    routes: Mapping[tuple[str, str], int]
    delta_tokens: Sequence[int]
    prompt_tokens: Sequence[int]
    session_seconds: Sequence[float]
    first_token_seconds: Sequence[float]
    tokens_per_second: float
    cached_share: float

    def print(self, console: Console) -> None:
        """Print the turns by pool and reason, the distributions of ΔL and L, and the other figures."""
        self.print_decisions(console)
        table = _table("summary", "", "")
        table.add_row("sessions", f"{self.sessions:,}")
        table.add_row("turns", f"{self.turns:,}")
        for name, values in (
            ("session latency", self.session_seconds),
            ("time to first token", self.first_token_seconds),
        ):
            for share in ("median", "p95"):
                value = f"{quantile(values, QUANTILES[share]):,.3f} s" if values else "-"
                table.add_row(f"{name}, {share}", value)
        table.add_row("prompt tokens cached", f"{self.cached_share:.1%}")
        table.add_row("generated tokens per second", f"{self.tokens_per_second:,.1f}")
        table.add_row("duration of the run", f"{self.wall_seconds:,.1f} s")
        table.add_row("client retries", f"{self.retries:,}")
        table.add_row("turns lost", f"{self.lost:,}")
        console.print(table)

    def print_decisions(self, console: Console) -> None:
        """Print the turns by pool and reason, and the distributions of ΔL and L; nothing if there were none."""
        if not self.routes:
            return
        table = _table("turns by pool and reason", "pool", "reason", "turns", "share")
        for (pool, reason), count in sorted(self.routes.items(), reverse=True):
            share = count / sum(self.routes.values())
            table.add_row(pool, reason, f"{count:,}", f"{share:.1%}")
        lengths = _table("prompt length L and growth ΔL, in tokens", "", *QUANTILES)
        for name, values in (("ΔL", self.delta_tokens), ("L", self.prompt_tokens)):
            if values:
                lengths.add_row(name, *(f"{quantile(values, share):,.0f}" for share in QUANTILES.values()))
        console.print(table, lengths)


def summarize(result: ReplayResult) -> Summary:
    """The statistics of a replay."""
    answered = [record for record in result.turns if record.error is None]
    sessions = result.by_session()
    complete = [records for records in sessions.values() if all(record.error is None for record in records)]
    completion = sum(record.usage.completion_tokens for record in answered)
    prompt = sum(record.usage.prompt_tokens for record in answered)
    verdicts = [record.verdict for record in result.turns]
    return Summary(
        sessions=len(sessions),
        turns=result.planned_turns,
        lost=result.planned_turns - len(answered),
        retries=sum(record.attempts - 1 for record in result.turns),
        wall_seconds=result.wall_seconds,
        routes=Counter((v.pool, v.reason or "-") for v in verdicts if v.pool is not None),
        delta_tokens=sorted(v.delta_tokens for v in verdicts if v.delta_tokens is not None),
        prompt_tokens=sorted(v.prompt_tokens for v in verdicts if v.prompt_tokens is not None),
        session_seconds=sorted(sum(record.latency for record in records) for records in complete),
        first_token_seconds=sorted(record.ttft for record in answered if record.ttft is not None),
        tokens_per_second=completion / result.wall_seconds if result.wall_seconds else 0.0,
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
        lengths = verdict.delta_tokens, verdict.prompt_tokens
        if verdict.pool is None:
            continue
        if (verdict.pool, *lengths, verdict.turn) == astuple(expectation):
            same += 1
        elif record.unacknowledged and lengths == (0, expectation.prompt_tokens):
            repeated.append((record, expectation))
        else:
            differing.append((record, expectation))
    return Comparison(same, repeated, differing)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column == "reason" else "right")
    return table
