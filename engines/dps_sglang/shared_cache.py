"""Batches of pages between an engine's host memory and the shared store."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dps_sglang.storage.shard import Outcome
from dps_sglang.storage.store import PageStore

T = TypeVar("T")

THREADS = 8
"""Computing checksums (1.7 GB/s per thread) releases the GIL, so throughput grows with the number of threads."""

REMEMBERED_TRANSFERS = 1000
"""Maximum number of fetches, and of writes, that are kept until SGLang collects them."""


@dataclass(frozen=True)
class Transfer:
    """A batch of pages that were read and verified, or that were written, and how long it took."""

    pages: int
    seconds: float


class HostPages(Protocol):
    """The engine's host memory, addressed by a page's first token slot."""

    def load(self, slot: int) -> memoryview:
        """The bytes of a page."""
        ...

    def buffer(self) -> memoryview:
        """A new writable buffer for one page."""
        ...

    def save(self, slot: int, page: memoryview) -> None:
        """Copy a buffer into a page of host memory."""
        ...


class SharedCache:
    """Reads and writes batches of pages, several at once."""

    def __init__(self, store: PageStore, host: HostPages) -> None:
        self._store = store
        self._host = host
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dps-prefix-cache")
        self._closed = False
        self._fetches: deque[Transfer] = deque(maxlen=REMEMBERED_TRANSFERS)
        self._writes: deque[Transfer] = deque(maxlen=REMEMBERED_TRANSFERS)

    def close(self) -> None:
        """From now on, no page is found, read or written. Transfers that are under way end early."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def prefix_pages(self, keys: Sequence[str]) -> int:
        """The number of pages that are present before the first missing one."""
        for number, key in enumerate(keys):
            if self._closed or not self._store.contains(key):
                return number
        return len(keys)

    def read(self, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Whether each page was read and verified. Host memory changes only for those that were."""
        started = time.perf_counter()
        results = self._each(self._read, keys, slots, closed=False)
        if any(results):
            self._fetches.append(Transfer(sum(results), time.perf_counter() - started))
        return results

    def write(self, keys: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Whether each page is in the store now."""
        started = time.perf_counter()
        outcomes = self._each(self._write, keys, slots, closed=Outcome.BUSY)
        if stored := outcomes.count(Outcome.STORED):
            self._writes.append(Transfer(stored, time.perf_counter() - started))
        return [outcome in (Outcome.STORED, Outcome.PRESENT) for outcome in outcomes]

    def take_fetches(self) -> list[Transfer]:
        """The fetches since the last call."""
        return _taken(self._fetches)

    def take_writes(self) -> list[Transfer]:
        """The writes since the last call, by the pages that were not in the store before."""
        return _taken(self._writes)

    def _each(
        self, operation: Callable[[str, int], T], keys: Sequence[str], slots: Sequence[int], closed: T
    ) -> list[T]:
        """The result for each page, or `closed` for all if the cache has been closed.

        Last page first, so that the beginning of a prefix is evicted after its end.
        """
        transfers: list[Future[T]] = []
        try:
            for key, slot in zip(reversed(keys), reversed(slots), strict=True):
                transfers.append(self._threads.submit(operation, key, slot))
            results = [transfer.result() for transfer in transfers]
        except (CancelledError, RuntimeError):
            if not self._closed:
                raise
            return [closed] * len(keys)
        finally:
            # The engine reuses the slots when this method returns, so no thread may still copy to or from them.
            # `concurrent.futures.wait` would never return if `close` has cancelled a transfer.
            for transfer in transfers:
                with contextlib.suppress(CancelledError):
                    transfer.exception()
        return results[::-1]

    def _read(self, key: str, slot: int) -> bool:
        page = self._host.buffer()
        if not self._store.get(key, page):
            return False
        self._host.save(slot, page)
        return True

    def _write(self, key: str, slot: int) -> Outcome:
        return self._store.put(key, self._host.load(slot))


def _taken(transfers: deque[Transfer]) -> list[Transfer]:
    return [transfers.popleft() for _ in range(len(transfers))]
