"""Statistics of a replay as tables for a terminal."""

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from dps_lab.replay.report import Quantiles, Summary


def routes_table(summary: Summary) -> Table:
    """The number of turns by pool and reason."""
    table = _table(f"{summary.label}: turns by pool and reason", "pool", "reason", "turns", "share")
    decided = sum(summary.routes.values())
    for (pool, reason), count in sorted(summary.routes.items(), reverse=True):
        table.add_row(pool, reason, f"{count:,}", f"{count / decided:.1%}")
    return table


def lengths_table(summary: Summary) -> Table:
    """The distributions of ΔL and L, in tokens."""
    title = f"{summary.label}: prompt length L and growth ΔL, in tokens"
    table = _table(title, "", "min", "p25", "median", "p75", "p95", "max")
    for name, length in (("ΔL", summary.delta_tokens), ("L", summary.prompt_tokens)):
        if length is not None:
            quantiles = (
                length.minimum,
                length.p25,
                length.median,
                length.p75,
                length.p95,
                length.maximum,
            )
            table.add_row(name, *(f"{value:,.0f}" for value in quantiles))
    return table


def runs_table(summaries: Sequence[Summary], title: str) -> Table:
    """Runs side by side: latency, throughput, retries and losses."""
    table = _table(title, "", *(summary.label for summary in summaries))
    rows: list[tuple[str, Callable[[Summary], str]]] = [
        ("sessions", lambda s: f"{s.sessions:,}"),
        ("turns", lambda s: f"{s.turns:,}"),
        ("sent to the speculative pool", lambda s: f"{s.speculative_share:.1%}" if s.routes else "-"),
        ("session latency, median", lambda s: _seconds(s.session_latency, lambda q: q.median, ",.3f")),
        ("session latency, p95", lambda s: _seconds(s.session_latency, lambda q: q.p95, ",.3f")),
        ("time to first token, median", lambda s: _seconds(s.ttft, lambda q: q.median, ",.3f")),
        ("time to first token, p95", lambda s: _seconds(s.ttft, lambda q: q.p95, ",.3f")),
        ("prompt tokens cached", lambda s: f"{s.cached_share:.1%}"),
        ("generated tokens per second", lambda s: f"{s.tokens_per_second:,.1f}"),
        ("duration of the run", lambda s: f"{s.wall_seconds:,.1f} s"),
        ("client retries", lambda s: f"{s.retries:,}"),
        ("turns lost", lambda s: f"{s.lost:,}"),
    ]
    for name, value in rows:
        table.add_row(name, *map(value, summaries))
    return table


def fleets_table(summaries: Sequence[Summary], title: str) -> Table:
    """One row for each run: batch time, session latency, and the shares of cached tokens and speculative turns."""
    table = _table(title, "fleet", "batch", "median", "p95", "cached", "spec.")
    for summary in summaries:
        table.add_row(
            summary.label,
            f"{summary.wall_seconds:.1f} s",
            _seconds(summary.session_latency, lambda q: q.median, ".2f"),
            _seconds(summary.session_latency, lambda q: q.p95, ".2f"),
            f"{summary.cached_share:.0%}",
            f"{summary.speculative_share:.0%}",
        )
    return table


def _seconds(quantiles: Quantiles | None, pick: Callable[[Quantiles], float], number_format: str) -> str:
    return "-" if quantiles is None else f"{pick(quantiles):{number_format}} s"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column == "reason" else "right")
    return table
