"""One value of the paper and the simulated one. This module performs no I/O."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dps_lab.simulate.report import Report

Role = Literal["fitted", "predicted", "constructed"]
"""fitted: the time model was fitted to the value. constructed: the workload was generated to have this value."""

Progress = Callable[[str], None]
"""Called with a description before each run."""


@dataclass(frozen=True)
class PaperValue:
    """One value of the paper and its simulation.

    table: the paper's Tables 1 to 3, or 4 to 6 for results that the paper has only in its text (section 4.4) and in
    the rows D and E of Table 1.
    """

    table: int
    row: str
    column: str
    paper: float
    simulated: float
    role: Role

    @property
    def error(self) -> float | None:
        """The relative error of the simulated value; None if the paper's value is 0."""
        return self.simulated / self.paper - 1 if self.paper else None


def sequential_columns(values: Sequence[float], report: Report) -> Iterator[tuple[str, float, float]]:
    """The columns of a sequential run: name, the paper's value and the simulated one."""
    median, p95, rate = values
    yield "Med (s)", median, report.session_seconds.median
    yield "p95 (s)", p95, report.session_seconds.p95
    yield "TPS", rate, report.tokens_per_second
