"""The decision log's file: complete lines, a bounded size, and failures of the disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from dps_gateway.telemetry.json_log import JsonLog


def entries(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_entries_are_appended_in_order_one_per_line(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    for run in range(2):  # the second run stands for a gateway that was restarted
        decisions = JsonLog(path)
        for number in range(3):
            decisions.add({"run": run, "turn": number})
        await decisions.flush()
        await decisions.flush()
    assert entries(path) == [{"run": run, "turn": number} for run in range(2) for number in range(3)]


async def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    decisions = JsonLog(path)
    decisions.add({})
    await decisions.flush()
    assert path.stat().st_mode & 0o077 == 0


async def test_file_that_reaches_the_maximum_size_is_renamed_and_replaces_the_previous_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "decisions.jsonl"
    decisions = JsonLog(path, max_file_bytes=30)
    for turn in range(5):
        decisions.add({"turn": turn})  # 11 bytes
        await decisions.flush()
    assert entries(tmp_path / "decisions.jsonl.1") == [{"turn": 0}, {"turn": 1}, {"turn": 2}]
    assert entries(path) == [{"turn": 3}, {"turn": 4}]
    decisions.add({"turn": 5})
    await decisions.flush()
    assert not path.exists()
    assert entries(tmp_path / "decisions.jsonl.1") == [{"turn": 3}, {"turn": 4}, {"turn": 5}]


async def test_entries_beyond_the_maximum_in_memory_are_dropped_and_counted(tmp_path: Path) -> None:
    path, dropped = tmp_path / "decisions.jsonl", list[int]()
    decisions = JsonLog(path, dropped.append, max_pending=2)
    for turn in range(5):
        decisions.add({"turn": turn})
    await decisions.flush()
    assert entries(path) == [{"turn": 0}, {"turn": 1}]
    assert dropped == [1, 1, 1]


async def test_missing_directory_is_logged_once_and_its_entries_are_counted_as_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, dropped = tmp_path / "missing", list[int]()
    decisions = JsonLog(folder / "decisions.jsonl", dropped.append)
    for _ in range(2):
        decisions.add({"turn": 1})
        decisions.add({"turn": 2})
        await decisions.flush()
    assert dropped == [2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        f"the log {folder}/decisions.jsonl cannot be written: No such file or directory"
    ]
    folder.mkdir()
    decisions.add({"turn": 3})
    await decisions.flush()
    assert entries(folder / "decisions.jsonl") == [{"turn": 3}]


async def content(decisions: JsonLog) -> list[Any]:
    return [json.loads(line) for line in b"".join([chunk async for chunk in decisions.read()]).splitlines()]


async def test_both_files_and_scheduled_entries_are_read_in_order(tmp_path: Path) -> None:
    decisions = JsonLog(tmp_path / "decisions.jsonl", max_file_bytes=30)
    for turn in range(4):
        decisions.add({"turn": turn})  # 11 bytes
        await decisions.flush()
    decisions.add({"turn": 4})
    assert await content(decisions) == [{"turn": turn} for turn in range(5)]


async def test_entries_that_are_written_during_a_read_are_left_out(tmp_path: Path) -> None:
    decisions = JsonLog(tmp_path / "decisions.jsonl")
    decisions.add({"turn": 0})
    reading = decisions.read()
    first = await anext(reading)
    decisions.add({"turn": 1})
    await decisions.flush()
    assert [first, *[chunk async for chunk in reading]] == [b'{"turn":0}\n']
