"""A short run of the benchmark of long requests and many streams."""

import os
from pathlib import Path

import pytest

from dps_lab.bench import peers, runner, scale


def count_words(text: str) -> int:
    return len(text.split())


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="the benchmark needs a core for the router alone"
)
def test_every_concurrency_has_a_table_with_a_row_for_each_router(tmp_path: Path) -> None:
    small = scale.Scale(rounds=1, body_bytes=8192, sessions=8, concurrency=(2, 4), streams=(3,), chunks=64)
    with runner.started(tmp_path, count_words, lambda upstreams, _: [peers.bare_proxy(upstreams)]) as bench:
        tables = [*scale.long_bodies(bench, small), *scale.long_streams(bench, small)]
    assert [text.splitlines()[0] for text in tables] == [
        "### non-streaming, 8 KB, growing sessions, 2 connections (rounds of 8 requests: 1)",
        "### non-streaming, 8 KB, growing sessions, 4 connections (rounds of 8 requests: 1)",
        "### 64-chunk stream, 4 KB, distinct sessions, 3 concurrent (rounds: 1)",
    ]
    assert all(f"| {peers.BARE} |" in text and "failed" not in text for text in tables)
