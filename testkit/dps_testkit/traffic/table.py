"""The table of fault cases: what clients saw of each. Pure; seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles


@dataclass(frozen=True)
class Observed:
    """What is left of one turn for the table. retries: attempts after the first; events: error events in streams.

    added: by how much it took longer than the median of its kind did while nothing was disturbed.
    troubles: the errors of its attempts. lost: what of its session was forgotten. from_memory: it was decided by
    what gateways have in mind, while Redis did not answer.
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
    """Every error that a client saw, and everything that was forgotten, in words."""

    @property
    def unnoticed(self) -> bool:
        """Whether clients saw nothing of it."""
        return self.retries == self.events == self.failures == self.forgotten == 0


def row(case: str, turns: Sequence[Observed]) -> Row:
    """Sum up the turns that ended during a case. ValueError if there were none: nothing was observed."""
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
    """The value that `percent` of them do not exceed, interpolated."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def undisturbed_median(latencies: Sequence[float]) -> float:
    """What a turn takes when nothing happens; 0 where nothing was measured."""
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
    """The table as Markdown; empty for no rows."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| :-- |" + " --: |" * (len(HEADINGS) - 1)]
    for one in rows:
        counts = (one.requests, one.retries, one.events, one.failures, one.forgotten, one.from_memory)
        seconds = (one.p95, one.worst, one.worst_added)
        cells = [one.case, *(f"{count:,}" for count in counts), *(f"{value:.2f}" for value in seconds)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@dataclass
class Report:
    """What is told at the end: the table's rows, and figures that are no column of it."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Markdown; empty if no fault case ran."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        return markdown(self.rows) + (f"\n{notes}" if notes else "")
