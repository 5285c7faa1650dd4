"""The plugin's metrics: the outcomes of reading and writing pages of the shared store, the refills by the draft model,
and the engines with which pages are shared.

SGLang exports them with its own. When prometheus_client is imported, it reads an environment variable that SGLang sets
in each of its processes, so it is imported late.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

PAGES = "dps_prefix_cache_pages"
REFILLS = "dps_prefix_cache_refills"
SHARING = "dps_prefix_cache_sharing"


class SharingMetric:
    """Exports which pages this process shares. The current state has the value 1, earlier ones have 0."""

    def __init__(self) -> None:
        self._exported: tuple[str, str] | None = None

    def export(self, pages: str, problem: str) -> None:
        """Replace the exported state.

        pages: identifies the pages that this process can read and write; empty if it shares none. problem: why it
        shares none.
        """
        if self._exported == (pages, problem):
            return
        if self._exported is not None:
            _sharing().labels(*self._exported).set(0)
        self._exported = pages, problem
        _sharing().labels(*self._exported).set(1)


def count_pages(new: Mapping[str, int]) -> None:
    """Add pages by outcome."""
    for outcome, pages in new.items():
        if pages:
            _pages().labels(outcome).inc(pages)


def count_refill(*, completed: bool) -> None:
    """Count a request whose fetched prefix the draft model of this process has prefilled, or could not prefill."""
    _refills().labels("completed" if completed else "failed").inc()


@cache
def _refills() -> Any:
    from prometheus_client import Counter

    return Counter(
        REFILLS, "Requests whose fetched prefix the draft model prefilled, by outcome", ["outcome"]
    )


@cache
def _pages() -> Any:
    from prometheus_client import Counter

    return Counter(
        PAGES, "Pages that this engine read from and wrote to the common prefix cache", ["outcome"]
    )


@cache
def _sharing() -> Any:
    from prometheus_client import Gauge

    return Gauge(
        SHARING,
        "1 for the pages of the common prefix cache that this engine shares, or the reason why it shares none",
        ["pages", "problem"],
        multiprocess_mode="max",
    )
