"""The report as Markdown. This module performs no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dps_lab.bench.summary import Spread, Summary
from dps_lab.bench.traffic import Content, TrafficPattern

_MICRO = 1e6


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. The first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def throughput(pattern: TrafficPattern, summaries: Mapping[str, Summary]) -> str:
    """The table of one traffic pattern, with a row per contender."""
    header = [
        "router",
        "req/s",
        "min–max",
        "x vllm",
        "min–max",
        "CPU µs/req",
        "x vllm per CPU s",
        "p50 ms",
        "CPU lost",
    ]
    rows = [
        [
            name,
            f"{summary.rate.median:,.0f}",
            _span(summary.rate, ",.0f"),
            f"{summary.ratio.median:.2f}",
            _span(summary.ratio, ".2f"),
            f"{summary.cpu * _MICRO:.0f}",
            f"{summary.cpu_ratio:.2f}",
            f"{summary.latency * 1e3:.2f}",
            f"{summary.lost * 100:.0f} %",
        ]
        for name, summary in summaries.items()
    ]
    return f"### {pattern}\n\n{markdown(header, rows)}"


def ratios(gateway: Mapping[TrafficPattern, Sequence[Spread]], routers: Sequence[str]) -> str:
    """The table of the gateway's requests per second relative to those of each of `routers`, with a row per pattern."""
    rows = [
        [str(pattern), *(f"{each.median:.2f} ({_span(each, '.2f')})" for each in spreads)]
        for pattern, spreads in gateway.items()
    ]
    return markdown(["requests per second of the gateway, relative to", *routers], rows)


def added_time(added: Mapping[Content, Mapping[str, Spread]], overhead: Mapping[Content, float]) -> str:
    """The table of added time in microseconds, with a row per router. The arguments are in seconds.

    overhead: the time that the gateway itself reports.
    """
    contents = list(added)
    names = list(next(iter(added.values())))
    rows = [
        [
            name,
            *(
                f"{added[content][name].median * _MICRO:.0f} ({_span(added[content][name], '.0f', _MICRO)})"
                for content in contents
            ),
        ]
        for name in names
    ]
    if overhead:
        reported = [f"{overhead[content] * _MICRO:.0f}" for content in contents]
        rows.append(["dps_gateway_overhead_seconds", *reported])
    return markdown(["time added before the engine, µs", *map(str, contents)], rows)


def cost_of_tracing(
    pattern: TrafficPattern,
    summaries: Mapping[str, Summary],
    typical: Mapping[str, Spread],
    slow: Mapping[str, Spread],
) -> str:
    """The table of one traffic pattern, with a row per configuration.

    typical, slow: p50 and p99 of the latency on one connection, in seconds.
    """
    header = ["tracing", "req/s", "x off", "min–max", "CPU µs/req", "p50 µs, 1 conn.", "p99 µs, 1 conn."]
    rows = [
        [
            name,
            f"{summary.rate.median:,.0f}",
            f"{summary.ratio.median:.2f}",
            _span(summary.ratio, ".2f"),
            f"{summary.cpu * _MICRO:.0f}",
            *(
                f"{each[name].median * _MICRO:,.0f} ({_span(each[name], ',.0f', _MICRO)})"
                for each in (typical, slow)
            ),
        ]
        for name, summary in summaries.items()
    ]
    return f"### {pattern}\n\n{markdown(header, rows)}"


@dataclass(frozen=True)
class Row:
    """A contender's results under a fixed number of connections. Times are in seconds.

    rate: requests per second. latency, first_byte: p50 and p99. cpu: CPU time per request.
    """

    rate: float
    latency: tuple[float, float]
    first_byte: tuple[float, float]
    cpu: float


def latencies(title: str, rows: Mapping[str, Row | None]) -> str:
    """The table of complete answers, with a row per contender. A contender that returned errors has None."""

    def cells(row: Row) -> list[str]:
        times = (f"{each * 1e3:,.0f}" for each in row.latency)
        return [f"{row.rate:,.0f}", *times, f"{row.cpu * _MICRO:,.0f}"]

    return _rows(title, ["router", "req/s", "p50 ms", "p99 ms", "CPU µs/req"], rows, cells)


def first_bytes(title: str, rows: Mapping[str, Row | None]) -> str:
    """The table of streams, with a row per contender. A contender that returned errors has None."""

    def cells(row: Row) -> list[str]:
        times = (f"{each * 1e3:,.0f}" for each in row.first_byte)
        return [*times, f"{row.latency[1]:.1f}", f"{row.cpu * 1e3:.2f}"]

    header = ["router", "first byte p50 ms", "first byte p99 ms", "last byte p99 s", "CPU ms/stream"]
    return _rows(title, header, rows, cells)


def workers(cpu: Mapping[TrafficPattern, tuple[float, float]]) -> str:
    """The table of CPU seconds per request with one worker and with two, with a row per pattern."""
    header = ["workers of the gateway on one core", "CPU µs/req, one", "two", "two x one, if on two cores"]
    rows = [
        [str(pattern), f"{one * _MICRO:.0f}", f"{two * _MICRO:.0f}", f"{2 * one / two:.2f}"]
        for pattern, (one, two) in cpu.items()
    ]
    return f"### Two workers\n\n{markdown(header, rows)}"


def _rows(
    title: str, header: Sequence[str], rows: Mapping[str, Row | None], cells: Callable[[Row], list[str]]
) -> str:
    failed = ["failed", *[""] * (len(header) - 2)]
    lines = [[name, *(failed if row is None else cells(row))] for name, row in rows.items()]
    return f"### {title}\n\n{markdown(header, lines)}"


def counts(title: str, values: Mapping[str, float]) -> str:
    """A line with the values of a counter, by labels."""
    parts = [f"{labels or 'total'} {value:,.0f}" for labels, value in values.items()]
    return f"{title}: {', '.join(parts) or 'none'}"


def _span(spread: Spread, form: str, factor: float = 1.0) -> str:
    return f"{spread.low * factor:{form}}–{spread.high * factor:{form}}"
