"""What a calibration minimises, and the limits that it observes. This module performs no I/O."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from dps_lab.calibrate.setup import Measurement

OBJECTIVES: Final[Mapping[str, Callable[[Measurement], float]]] = {
    "session": lambda figures: figures.session_median,
    "session-p95": lambda figures: figures.session_p95,
    "batch": lambda figures: figures.batch,
    "ttft": lambda figures: figures.ttft_median,
    "ttft-p95": lambda figures: figures.ttft_p95,
    "tpot": lambda figures: figures.tpot_median,
}
"""The figures that can be minimised, in seconds."""

OBJECTIVE_NAMES: Final[Mapping[str, str]] = {
    "session": "median session latency",
    "session-p95": "95th percentile of the session latency",
    "batch": "time for all sessions",
    "ttft": "median time to first token",
    "ttft-p95": "95th percentile of the time to first token",
    "tpot": "median time per output token",
}


@dataclass(frozen=True)
class Goal:
    """The objective, and limits by the name of the figure, in seconds."""

    objective: str = "session"
    limits: tuple[tuple[str, float], ...] = ()

    def value(self, figures: Measurement) -> float:
        """The figure to minimise, in seconds."""
        return OBJECTIVES[self.objective](figures)

    def excess(self, figures: Measurement) -> float:
        """The largest relative amount by which a limit is exceeded; 0 if all limits are met."""
        return max((OBJECTIVES[name](figures) / limit - 1 for name, limit in self.limits), default=0.0)

    def score(self, figures: Measurement) -> tuple[float, float]:
        """The order of preference, smallest first: excess over the limits, then the objective."""
        return max(0.0, self.excess(figures)), self.value(figures)
