"""Counts the pages that an engine reads from and writes to Mooncake (SGLang 0.5.23).

SGLang's backend states only which pages were transferred. The reason is in the codes that Mooncake returns for each
object, of which a page has one or more.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from dps_sglang.metrics import count_pages
from dps_sglang.sharing import SHARING

# Codes of Mooncake's mooncake-store/include/types.h.
FULL = frozenset({-200, -1700})
"""No segment has space, or the tenant's quota is used up."""
MISSING = frozenset({-703, -704, -707})
"""The object does not exist, is not complete yet, or was evicted while it was read."""
EXISTS = frozenset({-705})
"""Another engine has written the object."""

_codes = threading.local()


def record_codes(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the methods of `MooncakeStore` that transfer objects: remembers the codes that Mooncake returns."""
    codes = original(self, *args, **kwargs)
    _codes.last = list(codes)
    return codes


def counted_reads(
    original: Callable[..., Any], self: Any, keys: Any, host_indices: Any, extra_info: Any = None
) -> Any:
    """Wraps `MooncakeStore.batch_get_v1`."""
    _codes.last = []
    results = original(self, keys, host_indices, extra_info)
    if SHARING.begun:
        count_pages(read_outcomes(results, _codes.last))
    return results


def counted_writes(
    original: Callable[..., Any], self: Any, keys: Any, host_indices: Any, extra_info: Any = None
) -> Any:
    """Wraps `MooncakeStore.batch_set_v1`."""
    _codes.last = []
    results = original(self, keys, host_indices, extra_info)
    if SHARING.begun:
        count_pages(write_outcomes(results, _codes.last, _objects_per_page(self)))
    return results


def corrected(original: Callable[..., Any], self: Any) -> Any:
    """Wraps `MooncakeStore.get_stats`, whose bandwidth of fetches includes the keys of pages, but not the values."""
    stats = original(self)
    stats.prefetch_bandwidth = [_parts(self) * rate for rate in stats.prefetch_bandwidth]
    return stats


def read_outcomes(results: Sequence[bool], codes: Sequence[int]) -> dict[str, int]:
    """Pages by outcome. results: whether each page was read. codes: each object's size if it was read, or error."""
    failed = list(results).count(False)
    missing = MISSING.issuperset(code for code in codes if code < 0)
    return {"read": len(results) - failed, "missing" if missing else "read_error": failed}


def write_outcomes(results: Sequence[bool], codes: Sequence[int], objects_per_page: int) -> dict[str, int]:
    """Pages by outcome. results: whether each page is stored now. codes: 0, or the error, for each object to store."""
    failed = list(results).count(False)
    present = len(results) - failed
    stored = min(present, list(codes).count(0) // objects_per_page)
    errors = {code for code in codes if code}
    counts = {"stored": stored, "present": present - stored}
    if errors and EXISTS.issuperset(errors):
        counts["present"] += failed
    else:
        counts["full" if errors & FULL else "write_error"] = failed
    return counts


def _parts(store: Any) -> int:
    """Keys and values are separate objects, except with MLA."""
    return 1 if store.is_mla_backend else 2


def _objects_per_page(store: Any) -> int:
    heads: int = store.split_factor if store.should_split_heads else 1
    return _parts(store) * heads
