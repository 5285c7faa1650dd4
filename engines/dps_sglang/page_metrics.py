"""What happened to the pages of the shared store, as a metric of the engine."""

from collections.abc import Mapping
from functools import cache
from typing import Any

NAME = "dps_prefix_cache_pages"


class PageMetrics:
    """Exports the outcomes of one store."""

    def __init__(self) -> None:
        self._exported: dict[str, int] = {}

    def export(self, counts: Mapping[str, int]) -> None:
        """Add what is new since the last call. counts: pages by outcome since the start."""
        for outcome, total in counts.items():
            if new := total - self._exported.get(outcome, 0):
                _counter().labels(outcome).inc(new)
        self._exported = dict(counts)


@cache
def _counter() -> Any:
    # When it is imported, prometheus_client reads an environment variable that SGLang sets in each of its processes.
    from prometheus_client import Counter

    return Counter(NAME, "Pages that this engine read from and wrote to the common prefix cache", ["outcome"])
