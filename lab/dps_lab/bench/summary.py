"""Statistics over rounds. This module performs no I/O."""

from dataclasses import dataclass
from statistics import median

from dps_lab.bench.peers import VLLM


@dataclass(frozen=True)
class Round:
    """One contender in one round of a traffic pattern.

    rate: requests per second. latency: median, in seconds.
    cpu_seconds: CPU time of the router over `requests` requests.
    lost: share of the core's time that other processes used.
    """

    rate: float
    latency: float
    cpu_seconds: float
    requests: int
    lost: float


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """One contender over all rounds of a traffic pattern.

    ratio: requests per second relative to the reference in the same round, so that a temporary slowdown of the
    machine affects both.
    cpu: CPU seconds per request over all rounds.
    cpu_ratio: the reference's CPU seconds per request divided by `cpu`. It would be the ratio of rates if the router's
    core were the only limit.
    lost: median share of the router's core that other processes used; close to 0 on an idle machine.
    """

    rate: Spread
    ratio: Spread
    latency: float
    cpu: float
    cpu_ratio: float
    lost: float


def _cpu(rounds: list[Round]) -> float:
    return sum(each.cpu_seconds for each in rounds) / sum(each.requests for each in rounds)


def summarise(rounds: dict[str, list[Round]], compared_with: str = VLLM) -> dict[str, Summary]:
    """Summarise one traffic pattern. `rounds` has each contender's rounds in order and must include `compared_with`."""
    reference = rounds[compared_with]
    return {
        name: Summary(
            rate=Spread.of([each.rate for each in mine]),
            ratio=Spread.of([each.rate / other.rate for each, other in zip(mine, reference, strict=True)]),
            latency=median(each.latency for each in mine),
            cpu=_cpu(mine),
            cpu_ratio=_cpu(reference) / cpu if (cpu := _cpu(mine)) else 0.0,
            lost=median(each.lost for each in mine),
        )
        for name, mine in rounds.items()
    }
