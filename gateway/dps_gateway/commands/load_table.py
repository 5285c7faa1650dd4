"""The table of `dps top`: what the gateways did between two readings of their metrics."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from dps_gateway.pool import Pool

Series = tuple[str, str]
"""A sample's name, such as `dps_in_flight`, and the value of its label `pool` or `kind`, or an empty string."""


@dataclass(frozen=True)
class Reading:
    """The metrics of one gateway replica at one time.

    at_seconds: when they were read, on a monotonic clock. values: the sum of the samples of each series.
    """

    at_seconds: float
    values: Mapping[Series, float] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, at_seconds: float) -> "Reading":
        """Parse Prometheus' text format. Raises ValueError if `text` is not in this format."""
        values: defaultdict[Series, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                label = sample.labels.get("pool", sample.labels.get("kind", ""))
                values[sample.name, label] += sample.value
        return cls(at_seconds, values)

    def __getitem__(self, series: Series) -> float:
        return self.values.get(series, 0.0)


@dataclass(frozen=True)
class Interval:
    """Two readings of one gateway replica. `before` precedes `now`."""

    before: Reading
    now: Reading

    @property
    def seconds(self) -> float:
        return self.now.at_seconds - self.before.at_seconds

    def increase(self, series: Series) -> float:
        """The increase of a counter. A counter that decreased was reset by a restart, and started from zero."""
        increase = self.now[series] - self.before[series]
        return increase if increase >= 0 else self.now[series]


def load_table(intervals: Sequence[Interval]) -> str:
    """The load of both pools, summed over gateway replicas, and how the turns' prompts relate to their history.

    Latencies are means over the interval, in seconds. `-` stands for a mean or a share without values.
    """
    rates = {pool: _turns_per_second(intervals, pool) for pool in Pool}
    header = ("POOL", "READY", "IN FLIGHT", "QUEUED", "TURNS/S", "SHARE", "TTFT", "TPOT")
    rows = [header, *(_pool_row(intervals, pool, rates) for pool in Pool)]
    return "\n".join(
        [
            *_aligned(rows),
            "",
            f"history: {_history(intervals)}",
            f"session state: {_session_state(intervals)}",
        ]
    )


def _pool_row(intervals: Sequence[Interval], pool: Pool, rates: Mapping[Pool, float]) -> tuple[str, ...]:
    def now(name: str) -> float:
        return sum(interval.now[name, pool.value] for interval in intervals)

    # Every gateway replica has the same engines, but may not have discovered all of them yet.
    ready = max((interval.now["dps_ready_replicas", pool.value] for interval in intervals), default=0)
    return (
        pool.value,
        f"{ready:.0f}",
        f"{now('dps_in_flight'):.0f}",
        f"{now('dps_queued'):.0f}",
        f"{rates[pool]:.1f}",
        _percent(rates[pool], sum(rates.values())),
        _mean(intervals, "dps_time_to_first_token_seconds", pool),
        _mean(intervals, "dps_time_per_output_token_seconds", pool),
    )


def _turns_per_second(intervals: Iterable[Interval], pool: Pool) -> float:
    return sum(
        interval.increase(("dps_route_decisions_total", pool.value)) / interval.seconds
        for interval in intervals
    )


def _mean(intervals: Sequence[Interval], histogram: str, pool: Pool) -> str:
    count = sum(interval.increase((f"{histogram}_count", pool.value)) for interval in intervals)
    total = sum(interval.increase((f"{histogram}_sum", pool.value)) for interval in intervals)
    return f"{total / count:.3f}" if count else "-"


def _history(intervals: Sequence[Interval]) -> str:
    turns: Counter[str] = Counter()
    for interval in intervals:
        for name, kind in interval.now.values:
            if name == "dps_history_total":
                turns[kind] += round(interval.increase((name, kind)))
    return ", ".join(f"{kind} {turns[kind]}" for kind in sorted(turns) if turns[kind]) or "-"


def _session_state(intervals: Sequence[Interval]) -> str:
    degraded = sum(1 for interval in intervals if interval.now["dps_state_degraded", ""])
    return f"not written to Redis by {degraded} of {len(intervals)} gateways" if degraded else "ok"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows with their first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            [
                f"{first:<{widths[0]}}",
                *(f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)),
            ]
        )
        for first, *rest in rows
    ]
