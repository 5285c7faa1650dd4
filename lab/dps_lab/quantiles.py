"""Quantiles of measured and simulated values."""

from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, by linear interpolation."""
    if not ordered:
        raise ValueError("no values")
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
