"""The fleets that `dps demo` compares, each of two engines. This module performs no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dps_engines.pools import PoolName
from dps_lab.replay.report import Summary
from dps_local.prefix_cache import Sharing

THRESHOLD_TOKENS: Final = 128

_GREEDY: Final[Mapping[PoolName, int]] = {"greedy": 2}
_SPECULATIVE: Final[Mapping[PoolName, int]] = {"speculative": 2}
_BOTH: Final[Mapping[PoolName, int]] = {"speculative": 1, "greedy": 1}


@dataclass(frozen=True)
class Fleet:
    """Two engines, the policy that routes between them, and whether they share a prefix cache."""

    name: str
    engines: Mapping[PoolName, int]
    policy: str
    prefix_cache: Sharing

    @property
    def caches(self) -> str:
        """The kind of prefix cache."""
        return f"{self.prefix_cache} {'cache' if self.prefix_cache == 'common' else 'caches'}"

    @property
    def label(self) -> str:
        """The name, with the kind of prefix cache."""
        return f"{self.name}, {self.caches}"


FLEETS: Final = (
    Fleet("2 greedy", _GREEDY, "AlwaysGreedy", "separate"),
    Fleet("2 greedy", _GREEDY, "AlwaysGreedy", "common"),
    Fleet("2 speculative", _SPECULATIVE, "AlwaysSpeculative", "separate"),
    Fleet("2 speculative", _SPECULATIVE, "AlwaysSpeculative", "common"),
    Fleet(f"1 + 1 τ = {THRESHOLD_TOKENS}", _BOTH, "DeltaPrefill", "separate"),
    Fleet(f"1 + 1 τ = {THRESHOLD_TOKENS}", _BOTH, "DeltaPrefill", "common"),
    Fleet("1 + 1 Adaptive", _BOTH, "Adaptive", "common"),
)


TIE: Final = 0.03
"""Relative difference below which two fleets count as equally fast: single runs vary by a few percent."""


def fastest(summaries: Sequence[Summary], seconds: Callable[[Summary], float]) -> list[Summary]:
    """The runs that are fastest by a measure in seconds, best first."""
    ordered = sorted(summaries, key=seconds)
    return [summary for summary in ordered if seconds(summary) <= (1 + TIE) * seconds(ordered[0])]


def batch_seconds(summary: Summary) -> float:
    """The time for all sessions."""
    return summary.wall_seconds


def median_seconds(summary: Summary) -> float:
    """The median session latency; infinite if no session was answered."""
    return float("inf") if summary.session_latency is None else summary.session_latency.median


def conclusion(summaries: Sequence[Summary]) -> list[str]:
    """The fastest fleets, as lines of text."""
    return [
        f"shortest batch time: {_named(fastest(summaries, batch_seconds), batch_seconds)}",
        f"lowest median session latency: {_named(fastest(summaries, median_seconds), median_seconds)}",
    ]


def _named(summaries: Sequence[Summary], seconds: Callable[[Summary], float]) -> str:
    return "; ".join(f"{summary.label} ({seconds(summary):.2f} s)" for summary in summaries)
