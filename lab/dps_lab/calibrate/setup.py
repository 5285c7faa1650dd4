"""What a calibration chooses, and how it measures one choice. This module performs no I/O."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Self

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import policy_named
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.report import Spread, session_seconds
from dps_lab.simulate.run import Load, Scenario, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace

THRESHOLD_POLICIES: Final = ("DeltaPrefill", "TotalLength")
"""The policies that compare a length with τ."""


@dataclass(frozen=True, order=True)
class Setup:
    """A fleet and a policy. `threshold_tokens` is None for policies without a threshold."""

    speculative: int
    greedy: int
    policy: str
    threshold_tokens: int | None = None

    @property
    def two_pools(self) -> bool:
        """Whether the fleet has engines of both kinds."""
        return self.speculative > 0 and self.greedy > 0

    @property
    def fleet(self) -> str:
        """The fleet as `dps simulate --fleet` accepts it."""
        return f"speculative={self.speculative},greedy={self.greedy}"

    def __str__(self) -> str:
        threshold = "" if self.threshold_tokens is None else f", τ = {self.threshold_tokens:,}"
        return f"{self.fleet}, {self.policy}{threshold}"


@dataclass(frozen=True)
class Measurement:
    """The figures of one simulated set-up. Times are in seconds, `speculative_share` is from 0 to 1.

    tpot: time per output token after the first, of the turns that have more than one.
    """

    session_median: float
    session_p95: float
    batch: float
    ttft_median: float
    ttft_p95: float
    tpot_median: float
    speculative_share: float

    @classmethod
    def of(cls, results: Sequence[TurnResult]) -> Self:
        """The figures of a simulation's turns."""
        sessions = Spread.of(session_seconds(results))
        ttft = Spread.of(turn.first_token - turn.sent for turn in results)
        tpot = [
            (turn.finished - turn.first_token) / (turn.output_tokens - 1)
            for turn in results
            if turn.output_tokens > 1
        ]
        return cls(
            session_median=sessions.median,
            session_p95=sessions.p95,
            batch=max(turn.finished for turn in results) - min(turn.sent for turn in results),
            ttft_median=ttft.median,
            ttft_p95=ttft.p95,
            tpot_median=statistics.median(tpot) if tpot else 0.0,
            speculative_share=statistics.fmean(turn.pool is Pool.SPECULATIVE for turn in results),
        )

    @classmethod
    def mean(cls, measurements: Sequence[Self]) -> Self:
        """The mean of each figure, over runs with different seeds."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: statistics.fmean(getattr(each, name) for each in measurements) for name in names})


@dataclass(frozen=True)
class Conditions:
    """What a calibration does not choose: the sessions, the load and the engines' properties."""

    sessions: Sequence[SessionTrace]
    load: Load
    fleet: FleetSpec
    replicas: int = 1

    def measure(self, setup: Setup, seed: int) -> Measurement:
        """Simulate a set-up.

        Raises ValueError if a turn exceeds an engine's KV cache or the weights exceed the GPU's memory.
        """
        engines = {Pool.SPECULATIVE: setup.speculative, Pool.GREEDY: setup.greedy}
        scenario = Scenario(
            replace(self.fleet, engines=engines),
            policy_named(setup.policy, setup.threshold_tokens),
            self.load,
            self.replicas,
            seed,
        )
        return Measurement.of(simulate(self.sessions, scenario))
