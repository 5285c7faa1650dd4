"""The results of a simulation. This module performs no I/O."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dps_gateway.pool import Pool
from dps_lab.simulate.run import TurnResult


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile, in seconds."""

    median: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Quantiles by linear interpolation. Raises ValueError for no values."""
        ordered = sorted(values)
        return cls(quantile(ordered, 0.5), quantile(ordered, 0.95))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, by linear interpolation."""
    if not ordered:
        raise ValueError("no values")
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Report:
    """The output of `dps simulate --json`. Times are in seconds, shares from 0 to 1.

    batch_seconds: from the first arrival to the last token. session_seconds: the sum of the latencies of a
    session's turns, without think time. tokens_per_second: output tokens of all sessions divided by
    batch_seconds. speculative_share: turns that the speculative pool served. moved_share: turns that were
    served by a different pool than the session's previous turn. regret: relative increase of the mean session
    latency over that of the best static policy on the same fleet (0 if this policy was the best).
    """

    batch_seconds: float
    gpus: int
    session_seconds: Spread
    time_to_first_token_seconds: Spread
    tokens_per_second: float
    speculative_share: float
    moved_share: float
    regret: float

    def as_json(self) -> dict[str, Any]:
        """A JSON object with the field names above."""
        return asdict(self)


def session_seconds(results: Sequence[TurnResult]) -> list[float]:
    """The latency of each session, which is the sum of its turns' latencies, ordered by the end of the first turn."""
    sums: dict[str, float] = defaultdict(float)
    for result in results:
        sums[result.session] += result.seconds
    return list(sums.values())


def mean_session_seconds(results: Sequence[TurnResult]) -> float:
    """The mean session latency, which `regret` compares."""
    return statistics.fmean(session_seconds(results))


def summarize(results: Sequence[TurnResult], gpus: int, regret: float) -> Report:
    """The results of a run."""
    start = min(result.sent for result in results)
    batch = max(result.finished for result in results) - start
    turns = len(results)
    return Report(
        batch_seconds=batch,
        gpus=gpus,
        session_seconds=Spread.of(session_seconds(results)),
        time_to_first_token_seconds=Spread.of(result.first_token - result.sent for result in results),
        tokens_per_second=sum(result.output_tokens for result in results) / batch,
        speculative_share=sum(result.pool is Pool.SPECULATIVE for result in results) / turns,
        moved_share=sum(result.moved for result in results) / turns,
        regret=regret,
    )
