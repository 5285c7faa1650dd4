"""One process and one directory: a read returns the stored page or a miss."""

import os
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_sglang.storage.geometry import Geometry
from dps_sglang.storage.page import PageError, PageFormat
from dps_sglang.storage.shard import Outcome, Shard
from dps_sglang.storage.store import SHARDS
from tests.plugin.pages import (
    GEOMETRY,
    PAGE_BYTES,
    PAYLOAD_BYTES,
    SECRET,
    files,
    payload,
    read,
    same_shard,
    store,
    total_bytes,
)


def test_stored_page_is_read_by_another_engine(tmp_path: Path) -> None:
    assert store(tmp_path).put("k", payload("k")) is Outcome.STORED
    reader = store(tmp_path)
    assert reader.contains("k")
    assert read(reader, "k") == payload("k")
    assert reader.put("k", payload("k")) is Outcome.PRESENT


def test_unknown_page_is_a_miss(tmp_path: Path) -> None:
    assert not store(tmp_path).contains("k")
    assert read(store(tmp_path), "k") is None


def changed(geometry: Geometry, field: str) -> Geometry:
    value = getattr(geometry, field)
    change: dict[str, Any] = {field: value * 2 if isinstance(value, int) else f"{value}x"}
    return replace(geometry, **change)


@pytest.mark.parametrize("field", [field.name for field in fields(Geometry)])
def test_page_of_another_geometry_is_a_miss_and_is_kept(tmp_path: Path, field: str) -> None:
    store(tmp_path).put("k", payload("k"))
    other = changed(GEOMETRY, field)
    assert read(store(tmp_path, other), "k", other.page_bytes) is None
    assert read(store(tmp_path), "k") == payload("k")


def test_page_written_with_another_secret_is_a_miss(tmp_path: Path) -> None:
    store(tmp_path, secret=b"0123456789abcdef").put("k", payload("k"))
    assert read(store(tmp_path), "k") is None


def test_listing_reveals_neither_keys_nor_geometry(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 4
    store(tmp_path).put(key, payload(key))
    (page,) = files(tmp_path)
    name = str(page.relative_to(tmp_path))
    digest = GEOMETRY.digest().hex()
    assert key[:8] not in name
    assert digest[:8] not in name
    store(tmp_path / "other", secret=b"another secret of a router").put(key, payload(key))
    (other,) = files(tmp_path / "other")
    assert (other.name, other.parent.name) != (page.name, page.parent.name)


def test_payload_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="the page has 7 bytes, but the geometry requires 4096"):
        store(tmp_path).put("k", b"7 bytes")


def empty(page: Path) -> None:
    page.write_bytes(b"")


def truncate(page: Path) -> None:
    os.truncate(page, PAGE_BYTES // 2)


def lengthen(page: Path) -> None:
    page.write_bytes(page.read_bytes() + bytes(500))


def overwrite(page: Path) -> None:
    page.write_bytes(os.urandom(PAGE_BYTES))


def overwrite_payload(page: Path) -> None:
    page.write_bytes(page.read_bytes()[:-PAYLOAD_BYTES] + os.urandom(PAYLOAD_BYTES))


DAMAGES = [empty, truncate, lengthen, overwrite, overwrite_payload]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_page_is_a_miss_and_is_repaired(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    pages = store(tmp_path)
    pages.put("k", payload("k"))
    damage(files(tmp_path)[0])
    assert read(pages, "k") is None
    assert pages.counts()["rejected"] == 1
    assert not files(tmp_path)
    assert pages.put("k", payload("k")) is Outcome.STORED
    assert read(pages, "k") == payload("k")


@pytest.mark.parametrize("damage", [empty, truncate, lengthen, overwrite])
def test_damage_visible_in_the_header_is_found_without_reading_the_payload(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    pages = store(tmp_path)
    pages.put("k", payload("k"))
    damage(files(tmp_path)[0])
    assert not pages.contains("k")
    assert pages.put("k", payload("k")) is Outcome.STORED


def test_page_under_another_pages_name_is_a_miss(tmp_path: Path) -> None:
    pages = store(tmp_path)
    pages.put("a", payload("a"))
    (a,) = files(tmp_path)
    pages.put("b", payload("b"))
    (b,) = {*files(tmp_path)} - {a}
    b.write_bytes(a.read_bytes())
    assert read(pages, "b") is None
    assert read(pages, "a") == payload("a")


@settings(max_examples=60)
@given(position=st.integers(0, PAGE_BYTES - 1), bit=st.integers(0, 7))
def test_page_with_any_flipped_bit_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    root = tmp_path_factory.mktemp("store")
    pages = store(root)
    pages.put("k", payload("k"))
    (page,) = files(root)
    data = bytearray(page.read_bytes())
    data[position] ^= 1 << bit
    page.write_bytes(data)
    assert read(pages, "k") is None


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncate": truncate,
    "delete": Path.unlink,
    "overwrite": overwrite,
}
KEYS = st.sampled_from([str(number) for number in range(300)])
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "truncate", "delete", "overwrite"]), KEYS), max_size=120
)


@settings(max_examples=25)
@given(operations=OPERATIONS)
def test_read_returns_the_stored_page_or_a_miss_and_the_limit_holds(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    engines = [store(root, pages_per_shard=2), store(root, pages_per_shard=2)]
    for number, (operation, key) in enumerate(operations):
        pages = engines[number % 2]
        present = files(root)
        chosen = present[int(key) % len(present)] if present else None
        if operation == "put":
            assert pages.put(key, payload(key)) in (Outcome.STORED, Outcome.PRESENT)
            assert read(engines[0], key) == payload(key)
        elif operation == "get":
            assert read(pages, key) in (None, payload(key))
        elif chosen is not None:
            DAMAGE[operation](chosen)
        assert total_bytes(root) <= SHARDS * 2 * PAGE_BYTES


def test_least_recently_used_page_is_evicted_first(tmp_path: Path) -> None:
    pages = store(tmp_path, pages_per_shard=4)
    first, *others, last = same_shard(tmp_path, 5)
    for key in (first, *others):
        pages.put(key, payload(key))
        time.sleep(0.02)
    assert read(pages, first) == payload(first)
    assert pages.put(last, payload(last)) is Outcome.STORED
    assert [read(pages, key) is not None for key in (first, *others, last)] == [True, False, True, True, True]
    assert pages.counts()["evicted"] == 1


def test_pages_of_other_geometries_count_and_are_evicted(tmp_path: Path) -> None:
    old = store(tmp_path, replace(GEOMETRY, weights="revision-0"), pages_per_shard=2)
    new = store(tmp_path, pages_per_shard=2)
    for number in range(600):
        old.put(str(number), payload(str(number)))
    for number in range(600):
        new.put(str(number), payload(str(number)))
    assert total_bytes(tmp_path) <= SHARDS * 2 * PAGE_BYTES
    assert read(old, "599") is None
    assert read(new, "599") == payload("599")


def test_page_larger_than_a_shards_limit_is_not_stored(tmp_path: Path) -> None:
    pages = store(tmp_path, pages_per_shard=0)
    assert pages.put("k", payload("k")) is Outcome.TOO_LARGE
    assert not files(tmp_path)


def test_minimum_free_space_is_kept(tmp_path: Path) -> None:
    pages = store(tmp_path, minimum_free_bytes=2**62)
    assert pages.put("k", payload("k")) is Outcome.FULL
    assert not files(tmp_path)


def test_deleted_folder_is_created_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    pages = store(root)
    pages.put("k", payload("k"))
    root.rename(tmp_path / "gone")
    assert read(pages, "k") is None
    assert pages.put("k", payload("k")) is Outcome.STORED
    assert read(store(root), "k") == payload("k")


@pytest.mark.parametrize("ledger", [b"", b"\xff" * 16, b"torn"])
def test_used_bytes_are_recounted_if_the_lock_file_is_damaged(tmp_path: Path, ledger: bytes) -> None:
    pages = store(tmp_path, pages_per_shard=3)
    keys = same_shard(tmp_path, 8)
    for key in keys:
        for lock in tmp_path.glob("*/lock"):
            lock.write_bytes(ledger)
        assert pages.put(key, payload(key)) is Outcome.STORED
        assert len(files(tmp_path)) <= 3


def test_file_that_is_larger_than_all_recorded_pages_is_replaced(tmp_path: Path) -> None:
    shard = Shard(tmp_path, limit_bytes=1000)
    path = tmp_path / "geometry/k.page"
    assert shard.put(tmp_path / "geometry/other.page", [b"page"]) is Outcome.STORED
    path.write_bytes(bytes(100))
    assert shard.put(path, [b"page"]) is Outcome.STORED
    assert path.read_bytes() == b"page"


def pipe(path: Path, target: Path) -> None:
    os.mkfifo(path)


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def link_to_itself(path: Path, target: Path) -> None:
    path.symlink_to(path)


def link_through_a_file(path: Path, target: Path) -> None:
    path.symlink_to(target / "page")


@pytest.mark.parametrize("plant", [pipe, link, link_to_itself, link_through_a_file])
def test_links_and_pipes_are_misses_and_are_replaced(
    tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    pages = store(tmp_path / "root")
    pages.put("k", payload("k"))
    path, _ = pages._locate("k")
    target = tmp_path / "target"
    path.rename(target)
    plant(path, target)
    assert read(pages, "k") is None
    assert not pages.contains("k")
    assert pages.put("k", payload("k")) is Outcome.STORED
    assert read(pages, "k") == payload("k")
    assert path.is_file()
    assert not path.is_symlink()


def test_unfinished_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    pages = store(tmp_path / "root")
    pages.put("k", payload("k"))
    path, _ = pages._locate("k")
    path.unlink()
    target = tmp_path / "target"
    target.write_text("another program's")
    path.with_suffix(".tmp").symlink_to(target)
    assert pages.put("k", payload("k")) is Outcome.WRITE_ERROR
    assert target.read_text() == "another program's"
    assert pages.put("k", payload("k")) is Outcome.STORED


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    pages = store(tmp_path, pages_per_shard=1)
    first, second = same_shard(tmp_path, 2)
    pages.put(first, payload(first))
    note = files(tmp_path)[0].with_name("README")
    note.write_text("not a page")
    pages.put(second, payload(second))
    assert note.read_text() == "not a page"
    assert read(pages, first) is None


@pytest.mark.parametrize("name", ["folder.page", "folder.tmp"])
def test_folder_with_the_name_of_a_page_does_not_prevent_evictions(tmp_path: Path, name: str) -> None:
    pages = store(tmp_path, pages_per_shard=1)
    first, second = same_shard(tmp_path, 2)
    pages.put(first, payload(first))
    folder = files(tmp_path)[0].with_name(name)
    folder.mkdir()
    os.utime(folder, (0, 0))
    assert pages.put(second, payload(second)) is Outcome.STORED
    assert read(pages, first) is None
    assert folder.is_dir()


def test_folder_in_the_place_of_a_page_is_a_miss_and_leaves_no_descriptor_open(tmp_path: Path) -> None:
    pages = store(tmp_path)
    path, _ = pages._locate("k")
    path.mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    assert not pages.contains("k")
    assert read(pages, "k") is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert pages.put("k", payload("k")) is Outcome.WRITE_ERROR


def test_keys_are_salted_by_geometry(tmp_path: Path) -> None:
    other = PageFormat.of(replace(GEOMETRY, layout="layer_first"), SECRET)
    assert PageFormat.of(GEOMETRY, SECRET).name("k") != other.name("k")
