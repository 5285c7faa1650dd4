"""Batches between host memory and the store, with host memory as plain bytes."""

import threading
import time
from pathlib import Path

import pytest

from dps_sglang.shared_cache import SharedCache, Transfer
from tests.plugin.pages import Memory, files, payload, store

PAGE_TOKENS = 64
KEYS = [f"page {number}" for number in range(20)]
SLOTS = [PAGE_TOKENS * (number + 3) for number in range(20)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    memory = Memory()
    memory.pages = {slot: payload(key) for key, slot in zip(KEYS, SLOTS, strict=True)}
    assert SharedCache(store(tmp_path), memory).write(KEYS, SLOTS) == [True] * len(KEYS)
    return tmp_path


def test_pages_arrive_in_the_slots_of_their_keys(written: Path) -> None:
    memory = Memory()
    reader = SharedCache(store(written), memory)
    assert reader.prefix_pages(KEYS) == len(KEYS)
    slots = SLOTS[::-1]
    assert reader.read(KEYS, slots) == [True] * len(KEYS)
    assert memory.pages == {slot: payload(key) for key, slot in zip(KEYS, slots, strict=True)}


def test_damaged_page_leaves_host_memory_unchanged(written: Path) -> None:
    pages = store(written)
    path, _ = pages._locate(KEYS[7])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    memory = Memory()
    results = SharedCache(pages, memory).read(KEYS, SLOTS)
    assert results == [key != KEYS[7] for key in KEYS]
    assert SLOTS[7] not in memory.pages


def test_fetches_are_measured_by_the_pages_that_arrived(written: Path) -> None:
    pages = store(written)
    pages._locate(KEYS[7])[0].unlink()
    cache = SharedCache(pages, Memory())
    cache.read(KEYS, SLOTS)
    cache.read(["unknown"], [0])
    (fetch,) = cache.take_fetches()
    assert fetch == Transfer(len(KEYS) - 1, fetch.seconds)
    assert fetch.seconds > 0
    assert cache.take_fetches() == []


def test_writes_are_measured_by_the_pages_that_were_not_stored_before(written: Path) -> None:
    pages = store(written)
    pages._locate(KEYS[7])[0].unlink()
    memory = Memory()
    memory.pages = {slot: payload(key) for key, slot in zip(KEYS, SLOTS, strict=True)}
    cache = SharedCache(pages, memory)
    cache.write(KEYS, SLOTS)
    cache.write(KEYS, SLOTS)
    (write,) = cache.take_writes()
    assert write == Transfer(1, write.seconds)
    assert write.seconds > 0
    assert cache.take_writes() == []


def test_prefix_ends_at_the_first_missing_page(written: Path) -> None:
    pages = store(written)
    pages._locate(KEYS[5])[0].unlink()
    assert SharedCache(pages, Memory()).prefix_pages(KEYS) == 5


def test_beginning_of_a_prefix_counts_as_more_recently_used_than_its_end(tmp_path: Path) -> None:
    memory = Memory()
    memory.pages = {slot: payload(key) for key, slot in zip(KEYS, SLOTS, strict=True)}
    pages = store(tmp_path)
    SharedCache(pages, memory).write(KEYS, SLOTS)
    assert len(files(tmp_path)) == len(KEYS)
    first, last = (pages._locate(key)[0].stat().st_mtime_ns for key in (KEYS[0], KEYS[-1]))
    assert first >= last


def test_no_page_is_copied_after_a_failed_transfer_has_returned(tmp_path: Path) -> None:
    """SGLang reuses the slots afterwards."""

    class SlowMemory(Memory):
        copied_at = 0.0

        def load(self, slot: int) -> memoryview:
            if slot == SLOTS[-1]:  # the first page that is written
                raise ValueError("not a page")
            time.sleep(0.05)
            self.copied_at = time.monotonic()
            return super().load(slot)

    memory = SlowMemory()
    memory.pages = {slot: payload(key) for key, slot in zip(KEYS, SLOTS, strict=True)}
    with pytest.raises(ValueError, match="not a page"):
        SharedCache(store(tmp_path), memory).write(KEYS, SLOTS)
    returned_at = time.monotonic()
    time.sleep(0.2)
    assert 0 < memory.copied_at < returned_at


def test_closed_cache_finds_and_stores_nothing(tmp_path: Path) -> None:
    """SGLang can detach the storage while transfers are under way."""
    memory = Memory()
    memory.pages = {0: payload("k")}
    cache = SharedCache(store(tmp_path), memory)
    cache.close()
    assert cache.write(["k"], [0]) == [False]
    assert cache.read(["k"], [0]) == [False]


def test_transfer_returns_if_the_cache_is_closed_before_all_its_pages_are_written(tmp_path: Path) -> None:
    """SGLang keeps its own cache, which has the KV of replaced weights, as long as a transfer is under way."""
    begun, closed = threading.Event(), threading.Event()

    class BlockingMemory(Memory):
        def load(self, slot: int) -> memoryview:
            begun.set()
            assert closed.wait(5)
            return super().load(slot)

    keys = [f"page {number}" for number in range(64)]
    memory = BlockingMemory()
    memory.pages = {slot: payload(key) for slot, key in enumerate(keys)}
    cache = SharedCache(store(tmp_path), memory)
    results: list[list[bool]] = []
    writer = threading.Thread(target=lambda: results.append(cache.write(keys, range(len(keys)))), daemon=True)
    writer.start()
    assert begun.wait(5)
    time.sleep(0.02)  # until the pages for which no thread is free are queued
    cache.close()
    closed.set()
    writer.join(5)
    assert results == [[False] * len(keys)]
