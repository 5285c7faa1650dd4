"""From single rounds to what is reported of them. Pure."""

from dataclasses import dataclass
from statistics import median

from dps_lab.bench.peers import VLLM


@dataclass(frozen=True)
class Round:
    """One contender in one cell in one round: requests per second, their median latency in seconds, the router's
    CPU time in seconds over a number of requests, and the share of its core's time that others used."""

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
    """One contender in one cell over all rounds.

    `ratio` compares requests per second with the reference's of the same round, so that what slows the machine
    for a while slows both; `cpu` is CPU seconds per request over all rounds together, and `cpu_ratio` the
    reference's CPU per request divided by it: how rates would compare if only the router's core counted.
    `lost` is the median share of the router's core that others used: on a quiet machine next to nothing.
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
    """One cell's rounds by contender, each list in the rounds' order; the one compared with among them."""
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
