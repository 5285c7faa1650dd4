"""The statistics of a replay as tables for a terminal, and the comparison with the oracle."""

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


def print_summary(result: ReplayResult, console: Console) -> None:
    """Print the turns by pool and reason, the distributions of ΔL and L, latencies, throughput and losses.

    The latency of a session is the sum of those of its turns, without think time, if all of them were answered.
    """
    print_decisions(result, console)
    answered = [record for record in result.turns if record.error is None]
    sessions = result.by_session()
    complete = [records for records in sessions.values() if all(record.error is None for record in records)]
    prompt = sum(record.usage.prompt_tokens for record in answered)
    cached = sum(record.usage.cached_tokens for record in answered)
    completion = sum(record.usage.completion_tokens for record in answered)
    table = _table("summary", "", "")
    table.add_row("sessions", f"{len(sessions):,}")
    table.add_row("turns", f"{result.planned_turns:,}")
    for name, values in (
        ("session latency", sorted(sum(record.latency for record in records) for records in complete)),
        ("time to first token", sorted(record.ttft for record in answered if record.ttft is not None)),
    ):
        for share in ("median", "p95"):
            value = f"{quantile(values, QUANTILES[share]):,.3f} s" if values else "-"
            table.add_row(f"{name}, {share}", value)
    table.add_row("prompt tokens cached", f"{cached / prompt if prompt else 0.0:.1%}")
    rate = completion / result.wall_seconds if result.wall_seconds else 0.0
    table.add_row("generated tokens per second", f"{rate:,.1f}")
    table.add_row("duration of the run", f"{result.wall_seconds:,.1f} s")
    table.add_row("client retries", f"{sum(record.attempts - 1 for record in result.turns):,}")
    table.add_row("turns lost", f"{result.lost:,}")
    console.print(table)


def print_decisions(result: ReplayResult, console: Console) -> None:
    """Print the turns by pool and reason, and the distributions of ΔL and L; nothing if there were none."""
    verdicts = [record.verdict for record in result.turns]
    routes = Counter(
        (verdict.pool, verdict.reason or "-") for verdict in verdicts if verdict.pool is not None
    )
    if not routes:
        return
    table = _table("turns by pool and reason", "pool", "reason", "turns", "share")
    for (pool, reason), count in sorted(routes.items(), reverse=True):
        table.add_row(pool, reason, f"{count:,}", f"{count / routes.total():.1%}")
    lengths = _table("prompt length L and growth ΔL, in tokens", "", *QUANTILES)
    for name, field in (("ΔL", "delta_tokens"), ("L", "prompt_tokens")):
        values = sorted(value for verdict in verdicts if (value := getattr(verdict, field)) is not None)
        if values:
            lengths.add_row(name, *(f"{quantile(values, share):,.0f}" for share in QUANTILES.values()))
    console.print(table, lengths)


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
