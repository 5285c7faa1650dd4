"""The table of fault cases: what clients observed during each. No I/O; times are in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles


@dataclass(frozen=True)
class Observed:
    """One turn, as it enters the table.

    added: latency above the undisturbed median of turns of the same kind (streaming or not).
    retries: attempts after the first. events: error events in streams. troubles: errors of the attempts.
    lost: the session state that was lost, if any.
    from_memory: whether the decision used a gateway's in-memory copy because Redis was unavailable.
    """

    latency: float
    added: float
    retries: int = 0
    events: int = 0
    failed: bool = False
    troubles: tuple[str, ...] = ()
    lost: str | None = None
    from_memory: bool = False


@dataclass(frozen=True)
class Row:
    """One fault case."""

    case: str
    requests: int
    retries: int
    events: int
    failures: int
    forgotten: int
    from_memory: int
    p95: float
    worst: float
    worst_added: float
    troubles: tuple[str, ...] = field(default=(), repr=False)
    """Descriptions of all errors and of all lost session state."""

    @property
    def unnoticed(self) -> bool:
        """Whether no client observed the fault."""
        return self.retries == self.events == self.failures == self.forgotten == 0


def row(case: str, turns: Sequence[Observed]) -> Row:
    """Summarise the turns that ended during a case. Raises ValueError if there were none."""
    if not turns:
        raise ValueError(f"{case}: no turn ended while it was observed")
    latencies = [turn.latency for turn in turns]
    return Row(
        case=case,
        requests=sum(1 + turn.retries for turn in turns),
        retries=sum(turn.retries for turn in turns),
        events=sum(turn.events for turn in turns),
        failures=sum(turn.failed for turn in turns),
        forgotten=sum(turn.lost is not None for turn in turns),
        from_memory=sum(turn.from_memory for turn in turns),
        p95=percentile(latencies, 95),
        worst=max(latencies),
        worst_added=max(0.0, *(turn.added for turn in turns)),
        troubles=tuple(trouble for turn in turns for trouble in (*turn.troubles, turn.lost) if trouble),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The `percent`-th percentile, interpolated."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def undisturbed_median(latencies: Sequence[float]) -> float:
    """The median latency of undisturbed turns; 0 if there are none."""
    return median(latencies) if latencies else 0.0


HEADINGS = (
    "case",
    "requests",
    "retries",
    "error events",
    "failures",
    "forgotten turns",
    "turns without Redis",
    "p95 s",
    "worst s",
    "worst added s",
)


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown; empty if there are no rows."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| :-- |" + " --: |" * (len(HEADINGS) - 1)]
    for entry in rows:
        counts = (
            entry.requests,
            entry.retries,
            entry.events,
            entry.failures,
            entry.forgotten,
            entry.from_memory,
        )
        seconds = (entry.p95, entry.worst, entry.worst_added)
        cells = [entry.case, *(f"{count:,}" for count in counts), *(f"{value:.2f}" for value in seconds)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@dataclass
class Report:
    """The rows of the table, and notes with figures that are not in the table."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The report in Markdown; empty if no fault case ran."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        return markdown(self.rows) + (f"\n{notes}" if notes else "")
