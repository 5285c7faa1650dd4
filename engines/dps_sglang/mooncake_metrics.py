"""Counts the pages that an engine reads from and writes to Mooncake, and measures its bandwidth (SGLang 0.5.23).

SGLang's backend states only which pages were transferred. The reason is in the codes that Mooncake returns for each
object, of which a page has one or more.
"""

import contextlib
import ctypes
import logging
import mmap
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from dps_sglang.metrics import count_pages
from dps_sglang.sharing import SHARING
from dps_sglang.storage.probe import BYTES, SECONDS, Bandwidth

logger = logging.getLogger(__name__)

# Codes of Mooncake's mooncake-store/include/types.h.
FULL = frozenset({-200, -1700})
"""No segment has space, or the tenant's quota is used up."""
MISSING = frozenset({-703, -704, -707})
"""The object does not exist, is not complete yet, or was evicted while it was read."""
EXISTS = frozenset({-705})
"""Another engine has written the object."""
BATCH_PAGES = 128
"""As many as SGLang transfers at once."""

_codes = threading.local()
_in_use: list[mmap.mmap] = []
"""Buffers of failed transfers, which Mooncake may still access."""


def noted(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
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


def measure_in_background(store: Any, page_bytes: int, page_tokens: int) -> None:
    """Measure the bandwidth of a `MooncakeStore` in a thread, and report it in the log and in SGLang's metrics."""
    threading.Thread(
        target=_measure, args=(store, page_bytes, page_tokens), name="dps-prefix-cache-measure", daemon=True
    ).start()


def _measure(store: Any, page_bytes: int, page_tokens: int) -> None:
    found = measure(store.store, page_bytes)
    if found is None:
        logger.warning("dps prefix cache: the bandwidth of Mooncake could not be measured")
        return
    if store.enable_storage_metrics:
        store.prefetch_bandwidth.append(found.read / 1e9 / _parts(store))  # see `corrected`
        store.backup_bandwidth.append(found.write / 1e9)
    logger.info(
        "dps prefix cache: the storage reads %.2f GB/s, which is the KV of %.0f tokens/s, and writes %.2f GB/s",
        found.read / 1e9,
        found.read / page_bytes * page_tokens,
        found.write / 1e9,
    )


def measure(client: Any, page_bytes: int) -> Bandwidth | None:
    """Write pages to Mooncake with one call, read them back again and again for at most SECONDS, and remove them.

    client: Mooncake's own. Returns None if Mooncake cannot use the memory, or if a transfer fails, for example because
    there is no space. Mooncake chooses the segments, so a part of the pages may not leave this machine.
    """
    pages = max(1, min(BATCH_PAGES, BYTES // page_bytes))
    buffer = mmap.mmap(-1, pages * page_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if client.register_buffer(address, len(buffer)):
        return None
    name = f"dps-measure-{uuid.uuid4().hex}"
    keys = [f"{name}-{number}" for number in range(pages)]
    addresses = [address + number * page_bytes for number in range(pages)]
    sizes = [page_bytes] * pages
    begun = time.perf_counter()
    if any(client.batch_put_from(keys, addresses, sizes)):
        _in_use.append(buffer)
        return None
    written = time.perf_counter()
    reads, ended = 0, written
    while ended - written < SECONDS and reads * len(buffer) < BYTES:
        if client.batch_get_into(keys, addresses, sizes) != sizes:
            _in_use.append(buffer)
            return None
        reads, ended = reads + 1, time.perf_counter()
    client.unregister_buffer(address)
    with contextlib.suppress(AttributeError, TypeError):  # earlier versions of Mooncake can only evict them
        client.batch_remove(keys, True)
    return Bandwidth(write=len(buffer) / (written - begun), read=reads * len(buffer) / (ended - written))
