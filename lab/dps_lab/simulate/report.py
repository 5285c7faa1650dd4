"""The results of a simulation. This module performs no I/O."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dps_gateway.pool import Pool
from dps_lab.quantiles import quantile
from dps_lab.simulate.run import Scenario, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace


@dataclass(frozen=True)
class Spread:
    """Mean, median and 95th percentile, in seconds."""

    mean: float
    median: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread, with quantiles by linear interpolation. Raises ValueError for no values."""
        ordered = sorted(values)
        return cls(statistics.fmean(ordered), quantile(ordered, 0.5), quantile(ordered, 0.95))


@dataclass(frozen=True)
class Report:
    """The output of `dps simulate --json`. Times are in seconds, shares from 0 to 1.

    batch_seconds: from the first arrival to the last token. session_seconds: the sum of the latencies of a
    session's turns, without think time. time_per_token_seconds: median time per output token after the first, of the
    turns that have more than one; 0 if there are none. tokens_per_second: output tokens of all sessions divided by
    batch_seconds. speculative_share: turns that the speculative pool served. moved_share: turns that were
    served by a different pool than the session's previous turn. regret: relative increase of the mean session
    latency over that of the best static policy on the same fleet (0 if this policy was the best).
    """

    batch_seconds: float
    gpus: int
    session_seconds: Spread
    time_to_first_token_seconds: Spread
    time_per_token_seconds: float
    tokens_per_second: float
    speculative_share: float
    moved_share: float
    regret: float


def mean_of(reports: Sequence[Report]) -> Report:
    """The mean of every figure of several runs of the same fleet."""
    mean: Report = _mean(reports)
    return mean


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, int | float):
        return first if all(value == first for value in values) else statistics.fmean(values)
    return type(first)(
        *(_mean(column) for column in zip(*(vars(each).values() for each in values), strict=True))
    )


def session_seconds(results: Sequence[TurnResult]) -> list[float]:
    """The latency of each session, which is the sum of its turns' latencies, ordered by the end of the first turn."""
    sums: dict[str, float] = defaultdict(float)
    for result in results:
        sums[result.session] += result.seconds
    return list(sums.values())


def report_of(sessions: Sequence[SessionTrace], scenario: Scenario) -> Report:
    """The results of a run, without regret. Raises ValueError as `simulate` does."""
    return summarize(simulate(sessions, scenario), scenario.fleet.gpus, 0.0)


def summarize(results: Sequence[TurnResult], gpus: int, regret: float) -> Report:
    """The results of a run."""
    start = min(result.sent for result in results)
    batch = max(result.finished for result in results) - start
    turns = len(results)
    per_token = [
        (turn.finished - turn.first_token) / (turn.output_tokens - 1)
        for turn in results
        if turn.output_tokens > 1
    ]
    return Report(
        batch_seconds=batch,
        gpus=gpus,
        session_seconds=Spread.of(session_seconds(results)),
        time_to_first_token_seconds=Spread.of(result.first_token - result.sent for result in results),
        time_per_token_seconds=statistics.median(per_token) if per_token else 0.0,
        tokens_per_second=sum(result.output_tokens for result in results) / batch,
        speculative_share=sum(result.pool is Pool.SPECULATIVE for result in results) / turns,
        moved_share=sum(result.moved for result in results) / turns,
        regret=regret,
    )
