"""Worker processes that die are replaced."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dps_gateway.workers import RESPAWN_SECONDS

COUNT = 4

PARENT = f"""
import sys, time
from multiprocessing.context import SpawnProcess
from dps_gateway.workers import run_workers

start = SpawnProcess.start

def start_and_report(worker):
    start(worker)
    print(worker.pid, flush=True)

SpawnProcess.start = start_and_report
sys.exit(run_workers({COUNT}, time.sleep, 600))
"""
"""Prints the process id of every worker that it starts."""


@asynccontextmanager
async def parent() -> AsyncIterator[tuple[Process, asyncio.StreamReader]]:
    """The parent of the workers, and what it prints."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=PIPE)
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def started(output: asyncio.StreamReader) -> list[int]:
    """The process ids of the next COUNT workers."""
    return [int(await output.readline()) for _ in range(COUNT)]


def kill(workers: list[int]) -> None:
    for worker in workers:
        os.kill(worker, signal.SIGKILL)


async def test_workers_that_die_together_are_replaced_together() -> None:
    async with parent() as (_, output):
        kill(await started(output))
        killed_at = time.monotonic()
        await started(output)
        assert RESPAWN_SECONDS <= time.monotonic() - killed_at < COUNT * RESPAWN_SECONDS


async def test_dead_workers_are_not_replaced_after_the_parent_was_told_to_stop() -> None:
    async with parent() as (process, output):
        kill(await started(output))
        await asyncio.sleep(RESPAWN_SECONDS / 2)
        process.terminate()
        assert await output.read() == b""
        assert await process.wait() == 0
