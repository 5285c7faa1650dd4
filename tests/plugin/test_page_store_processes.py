"""Several processes and one directory: killed writers, concurrent writers, and a file system that refuses writes."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

from dps_sglang.storage.page import HEADER_BYTES
from dps_sglang.storage.shard import Outcome
from dps_sglang.storage.store import SHARDS
from tests.plugin.pages import files, of_size, payload, read, script, store, total_bytes

ROOT = Path(__file__).parents[2]
LARGE = 256 * 1024
SECONDS = 60.0


@contextmanager
def writer(*arguments: object) -> Iterator["subprocess.Popen[str]"]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(script(*arguments), env=environment, stdin=PIPE, stdout=PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_page_whose_writer_was_killed_is_a_miss_until_the_next_writer_stores_it(tmp_path: Path) -> None:
    for number in range(3):
        with writer(tmp_path, LARGE, 2, number, 1, "hold") as process:
            until(lambda: any(path.stat().st_size > HEADER_BYTES for path in files(tmp_path, "*.tmp")))
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert len(files(tmp_path, "*.tmp")) == 1
        assert not files(tmp_path)
        pages = store(tmp_path, of_size(LARGE), pages_per_shard=2)
        assert not pages.contains(str(number))
        assert pages.put(str(number), payload(str(number), LARGE)) is Outcome.STORED
        assert read(pages, str(number), LARGE) == payload(str(number), LARGE)
        assert not files(tmp_path, "*.tmp")
        files(tmp_path)[0].unlink()


def test_unfinished_file_of_another_page_is_removed_when_the_used_bytes_are_recounted(tmp_path: Path) -> None:
    with writer(tmp_path, LARGE, 1, 0, 1, "hold") as process:
        until(lambda: files(tmp_path, "*.tmp"))
        process.send_signal(signal.SIGKILL)
    (left,) = files(tmp_path, "*.tmp")
    pages = store(tmp_path, of_size(LARGE), pages_per_shard=1)
    for number in range(1, 1000):
        if pages._locate(str(number))[0].parts[-3] == left.parts[-3]:
            assert pages.put(str(number), payload(str(number), LARGE)) is Outcome.STORED
            break
    assert not left.exists()


def test_hanging_writer_does_not_block_others_for_long(tmp_path: Path) -> None:
    with writer(tmp_path, LARGE, 2, 0, 1, "hold") as process:
        until(lambda: files(tmp_path, "*.tmp"))
        pages = store(tmp_path, of_size(LARGE), pages_per_shard=2, lock_seconds=0.05)
        assert pages.put("0", payload("0", LARGE)) is Outcome.BUSY
        output, _ = process.communicate("continue\n")
        assert output.split() == ["stored"]
    assert read(pages, "0", LARGE) == payload("0", LARGE)


def test_concurrent_writers_share_one_limit_and_no_wrong_page_is_read(tmp_path: Path) -> None:
    size, pages_per_shard, count = 8192, 2, 300
    limit = SHARDS * pages_per_shard * (size + HEADER_BYTES)
    reader = store(tmp_path, of_size(size), pages_per_shard=pages_per_shard)

    def intact() -> int:
        found = {str(number): read(reader, str(number), size) for number in range(0, 400, 7)}
        present = {key: value for key, value in found.items() if value is not None}
        assert present == {key: payload(key, size) for key in present}
        return len(present)

    with (
        writer(tmp_path, size, pages_per_shard, 0, count) as one,
        writer(tmp_path, size, pages_per_shard, 100, count) as other,
    ):
        while one.poll() is None or other.poll() is None:
            intact()
        for process in (one, other):
            assert process.stdout is not None
            outcomes = process.stdout.read().split()
            assert len(outcomes) == count
            assert set(outcomes) <= {"stored", "present"}
    assert intact()
    assert reader.counts().get("rejected", 0) == 0
    assert 0 < total_bytes(tmp_path) <= limit


def test_write_refused_by_the_file_system_stores_no_page_and_raises_no_error(tmp_path: Path) -> None:
    with writer(tmp_path, LARGE, 2, 0, 3, "small-files") as process:
        assert process.stdout is not None
        assert process.stdout.read().split() == ["full"] * 3
        assert process.wait() == 0
    assert total_bytes(tmp_path) == 0


def test_write_to_a_full_disk_raises_no_error_and_keeps_the_stored_pages(small_disk: Path) -> None:
    pages = store(small_disk, of_size(LARGE))
    outcomes = [pages.put(str(number), payload(str(number), LARGE)) for number in range(8)]
    assert outcomes[0] is Outcome.STORED
    assert outcomes[-1] is Outcome.FULL
    assert not files(small_disk, "*.tmp")
    stored = [number for number, outcome in enumerate(outcomes) if outcome is Outcome.STORED]
    for number in stored:
        assert read(pages, str(number), LARGE) == payload(str(number), LARGE)
    files(small_disk)[0].unlink()
    assert pages.put("again", payload("again", LARGE)) is Outcome.STORED
