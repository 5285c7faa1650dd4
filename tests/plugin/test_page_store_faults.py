"""Engines that share a directory while it is damaged: they read no wrong page, raise no error, and recover."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from dps_sglang.storage import shard
from dps_sglang.storage.shard import Outcome
from tests.plugin.engine import PAGES, PROMPTS, content, keys
from tests.plugin.pages import GEOMETRY, PAGE_BYTES, files, payload, read, same_shard, store

ROOT = Path(__file__).parents[2]
PAGE_TOKENS = GEOMETRY.page_tokens
SECONDS = 120.0
FAULTS = 6


class Engine:
    """An engine process, and the lines that it has printed."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("engine.py")), *map(str, arguments)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def until(self, condition: Callable[[list[str]], bool]) -> None:
        """Wait until the lines meet a condition. Fails if the engine ends."""
        deadline = time.monotonic() + SECONDS
        while not condition(self.lines):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def rounds(self, count: int) -> None:
        """Wait for this many further rounds."""
        known = len(self.lines)
        self.until(lambda lines: len(lines) >= known + count)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def engine(log: Path, *arguments: object) -> Iterator[Engine]:
    started = Engine(log, *arguments)
    try:
        yield started
    finally:
        started.kill()


Fault = Callable[[Path, random.Random], None]


def delete_folder(root: Path, _: random.Random) -> None:
    shutil.rmtree(root, ignore_errors=True)


def each_page(change: Callable[[Path, random.Random], None]) -> Fault:
    """A fault that changes every third page, in place, as engines read it."""

    def fault(root: Path, chance: random.Random) -> None:
        for page in files(root):
            if chance.random() < 0.3:
                with suppress(FileNotFoundError):
                    change(page, chance)

    return fault


def truncate(page: Path, chance: random.Random) -> None:
    os.truncate(page, chance.randrange(PAGE_BYTES))


def corrupt(page: Path, chance: random.Random) -> None:
    with page.open("r+b") as file:
        file.seek(chance.randrange(PAGE_BYTES))
        file.write(chance.randbytes(chance.randrange(1, 64)))


def exchange(page: Path, chance: random.Random) -> None:
    """Put the page of another prompt in its place."""
    others = files(page.parents[2])
    if others:
        page.write_bytes(chance.choice(others).read_bytes())


def replace_shard(root: Path, chance: random.Random) -> None:
    """Put a file in the place of a shard, so that every access to the shard fails, even for root."""
    shard = root / f"{chance.randrange(64):02x}"
    shutil.rmtree(shard, ignore_errors=True)
    with suppress(OSError):
        shard.write_text("not a folder")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(delete_folder, id="folder deleted"),
        pytest.param(each_page(truncate), id="pages truncated"),
        pytest.param(each_page(corrupt), id="pages corrupted"),
        pytest.param(each_page(exchange), id="pages exchanged"),
        pytest.param(replace_shard, id="shards replaced by files"),
    ],
)
def test_engines_use_no_wrong_page_and_continue(tmp_path: Path, fault: Fault) -> None:
    root, chance = tmp_path / "root", random.Random(0)
    with (
        engine(tmp_path / "one", root, PAGE_TOKENS, 100, 1) as one,
        engine(tmp_path / "two", root, PAGE_TOKENS, 100, 2) as two,
    ):
        for _ in range(FAULTS):
            one.rounds(1)
            two.rounds(1)
            fault(root, chance)
        delete_folder(root, chance)  # a shard that is a file stays unusable until someone removes it
        one.until(lambda lines: lines[-1] == str(PAGES))
        two.until(lambda lines: lines[-1] == str(PAGES))


def test_engines_that_are_killed_leave_no_wrong_page_and_block_nobody(tmp_path: Path) -> None:
    root, chance = tmp_path / "root", random.Random(0)
    with ExitStack() as stack:
        survivor = stack.enter_context(engine(tmp_path / "survivor", root, PAGE_TOKENS, 100, 1))
        for number in range(FAULTS):
            victim = stack.enter_context(engine(tmp_path / f"{number}", root, PAGE_TOKENS, 100, number))
            victim.until(lambda lines: len(lines) > 0)
            time.sleep(chance.random() / 50)
            victim.kill()
            if number % 3 == 0:
                delete_folder(root, chance)  # so that the next engine is killed while it writes
        survivor.rounds(2)
    pages = store(root, lock_seconds=10)
    for prompt in range(PROMPTS):
        for key in keys(prompt):
            assert pages.put(key, content(key)) in (Outcome.STORED, Outcome.PRESENT)
            assert read(pages, key) == content(key)


def test_engine_that_is_killed_while_it_fetches_holds_no_lock(tmp_path: Path) -> None:
    pages = store(tmp_path / "root", lock_seconds=0.05)
    for prompt in range(PROMPTS):
        for key in keys(prompt):
            pages.put(key, content(key))
    with engine(tmp_path / "log", tmp_path / "root", PAGE_TOKENS, 100, 1, "pause") as reader:
        reader.until(lambda lines: "fetching" in lines)
        for page in files(tmp_path / "root"):
            page.unlink()
        for key in keys(0):
            assert pages.put(key, content(key)) is Outcome.STORED
        reader.kill()
    assert all(read(pages, key) == content(key) for key in keys(0))


def test_engines_of_other_geometries_use_the_same_folder(tmp_path: Path) -> None:
    """Their pages compete for the same space, and have the same size and the same keys, but other contents."""
    root = tmp_path / "root"
    with (
        engine(tmp_path / "one", root, 64, 2, 1) as one,
        engine(tmp_path / "other", root, 32, 2, 1) as other,
    ):
        one.rounds(FAULTS)
        other.rounds(FAULTS)
        for each in (one, other):
            each.until(lambda lines: any(line != "0" for line in lines))


def test_new_pages_replace_old_ones_on_a_disk_that_is_smaller_than_the_limit(small_disk: Path) -> None:
    root = small_disk / "root"
    pages = store(root, pages_per_shard=1000)
    keys = same_shard(root, 600)
    outcomes = [pages.put(key, payload(key)) for key in keys]
    assert set(outcomes) == {Outcome.STORED}
    assert pages.counts()["evicted"] >= len(keys) - 2**20 // PAGE_BYTES
    assert [read(pages, key) for key in keys[-100:]] == [payload(key) for key in keys[-100:]]
    assert not files(root, "*.tmp")


def test_engines_on_a_full_disk_serve_what_is_stored(small_disk: Path, tmp_path: Path) -> None:
    root = small_disk / "root"
    with (
        engine(tmp_path / "one", root, PAGE_TOKENS, 100, 1) as one,
        engine(tmp_path / "two", root, PAGE_TOKENS, 100, 2) as two,
    ):
        one.rounds(FAULTS)
        two.rounds(FAULTS)
        one.until(lambda lines: any(line != "0" for line in lines))
    disk = os.statvfs(small_disk)
    assert disk.f_bavail * disk.f_frsize < 3 * PAGE_BYTES


@pytest.mark.parametrize(
    ("code", "evicted"),
    [(errno.ENOSPC, [3, 3, 6, 6]), (errno.EDQUOT, [3, 3, 6, 6]), (errno.EFBIG, [0, 0, 0, 0])],
    ids=["disk full", "quota used up", "pages too large for the file system"],
)
def test_pages_are_kept_if_evicting_them_does_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, evicted: list[int]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    now = 1000.0
    monkeypatch.setattr(shard, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    root = tmp_path / "root"
    pages = store(root, pages_per_shard=1000)
    *stored, new = same_shard(root, 31)
    for key in stored:
        assert pages.put(key, payload(key)) is Outcome.STORED
    monkeypatch.setattr(shard, "_write", refuse)
    found = []
    for wait in (0.0, 59.0, 2.0, 59.0):
        now += wait
        assert pages.put(new, payload(new)) is Outcome.FULL
        found.append(pages.counts()["evicted"])
    assert found == evicted
    assert len(files(root)) == len(stored) - evicted[-1]


def test_pages_are_kept_if_evicting_them_does_not_free_the_minimum_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, free = 1000.0, 2**40
    monkeypatch.setattr(shard, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    root = tmp_path / "root"
    pages = store(root, pages_per_shard=1000, minimum_free_bytes=2**30)
    *stored, new = same_shard(root, 31)
    for key in stored:
        assert pages.put(key, payload(key)) is Outcome.STORED
    free = 2**30
    evicted = []
    for wait in (0.0, 59.0, 2.0, 59.0):
        now += wait
        assert pages.put(new, payload(new)) is Outcome.FULL
        evicted.append(pages.counts()["evicted"])
    assert evicted == [3, 3, 6, 6]
    assert len(files(root)) == len(stored) - 6
    free = 2**40
    assert pages.put(new, payload(new)) is Outcome.STORED


def test_size_limit_is_kept_while_evictions_do_not_free_the_minimum_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine, which has no minimum, fills the shard up to its limit."""
    free = 2**40
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    root = tmp_path / "root"
    pages = store(root, pages_per_shard=4, minimum_free_bytes=2**30)
    other = store(root, pages_per_shard=4)
    *first, second, third, new = same_shard(root, 6)
    for key in first:
        assert pages.put(key, payload(key)) is Outcome.STORED
    free = 2**30
    assert pages.put(new, payload(new)) is Outcome.FULL
    for key in (second, third):
        assert other.put(key, payload(key)) is Outcome.STORED
    free = 2**40
    assert pages.put(new, payload(new)) is Outcome.STORED
    assert len(files(root)) == 4
