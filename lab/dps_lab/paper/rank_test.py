"""The Mann-Whitney U test, with which the paper compares session latencies. This module performs no I/O."""

import math
import statistics
from collections.abc import Iterator, Sequence


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p-value of the Mann-Whitney U test, by the normal approximation with tie correction."""
    ranks = _ranks([*first, *second])
    n, m = len(first), len(second)
    u = sum(ranks[:n]) - n * (n + 1) / 2
    total = n + m
    ties = sum(count**3 - count for count in _tie_sizes(ranks))
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance == 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return 2 * (1 - statistics.NormalDist().cdf(z))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for position in range(start, end):
            ranks[order[position]] = (start + 1 + end) / 2
        start = end
    return ranks


def _tie_sizes(ranks: Sequence[float]) -> Iterator[int]:
    counts: dict[float, int] = {}
    for rank in ranks:
        counts[rank] = counts.get(rank, 0) + 1
    yield from counts.values()
