"""Damages the directory of a common prefix cache, or kills an engine, while sessions change pools on every turn."""

import asyncio
import os
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread

from dps_sglang.metrics import PAGES
from dps_testkit.http import metric
from dps_testkit.waiting import PATIENCE_SECONDS, wait_until
from e2e.node import halting
from e2e.node.containers import kill
from e2e.node.sglang_fleet import ATTEMPTS, QUESTIONS, Fleet
from e2e.node.streams import LongStream
from e2e.prefix_cache.alternation import LONG, SHORT, fewer_sessions
from e2e.prefix_cache.sessions import Session

PAUSE_SECONDS = 0.1
SHARE = 0.1
"""Share of the pages that is changed at once."""
CHANCE = random.Random(0)


def truncate(pages: Path) -> None:
    """Cut some pages, in place, at a random length."""
    for page in _some(pages):
        with suppress(FileNotFoundError):
            os.truncate(page, CHANCE.randrange(page.stat().st_size + 1))


def corrupt(pages: Path) -> None:
    """Overwrite up to 64 bytes of some pages, in place."""
    for page in _some(pages):
        with suppress(FileNotFoundError), page.open("r+b") as file:
            file.seek(CHANCE.randrange(page.stat().st_size + 1))
            file.write(CHANCE.randbytes(CHANCE.randrange(1, 64)))


def delete(pages: Path) -> None:
    """Delete everything in the directory."""
    for folder in pages.iterdir():
        shutil.rmtree(folder, ignore_errors=True)


def _some(pages: Path) -> list[Path]:
    return [page for page in pages.glob("*/*/*.page") if CHANCE.random() < SHARE]


@contextmanager
def repeatedly(fault: Callable[[Path], None], pages: Path) -> Iterator[None]:
    """Inject a fault again and again until the block exits."""
    ended = Event()

    def inject() -> None:
        while not ended.is_set():
            fault(pages)
            time.sleep(PAUSE_SECONDS)

    thread = Thread(target=inject)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def full(pages: Path) -> Iterator[None]:
    """Leave no free space on the file system until the block exits."""
    filler = pages / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**20))
    try:
        yield
    finally:
        filler.unlink()


DIRECTORY: Mapping[str, Callable[[Path], AbstractContextManager[None]]] = {
    "pages truncated": partial(repeatedly, truncate),
    "pages corrupted": partial(repeatedly, corrupt),
    "directory deleted": partial(repeatedly, delete),
    "disk full": full,
}
"""The faults of the directory."""
REPORTED = {"pages truncated": ["rejected"], "pages corrupted": ["rejected"], "disk full": ["evicted"]}
"""The outcomes by which the engines' metric of pages shows a fault."""


async def check_directory_fault(fleet: Fleet, fault: str) -> None:
    """Assert that one of the faults in DIRECTORY causes no failed request and no wrong answer, and is reported.

    Sessions are played until it is reported. If the other pool's pages are not written yet when a turn begins, the
    engine reads none of them, neither damaged nor undamaged ones.
    """
    before = await fleet.pages_by_outcome()
    played: list[Session] = []
    with DIRECTORY[fault](fleet.pages):
        for attempt in range(ATTEMPTS):
            played += await fleet.play(fewer_sessions(f"{fault} {attempt}"))
            new = await fleet.pages_by_outcome() - before
            if all(new[outcome] for outcome in REPORTED.get(fault, [])):
                break

    assert [outcome for outcome in REPORTED.get(fault, []) if not new[outcome]] == []
    await fleet.recover(fault, played)


async def check_killed_engine(fleet: Fleet, pool: str) -> None:
    """Assert that no answer is wrong and no request fails if an engine is killed while it writes and fetches pages.

    The other engine continues its streams.
    """
    pod = fleet.engine_pod(pool)
    (other,) = QUESTIONS.keys() - {pool}
    stored = f"stored by the {other} engine"
    await fleet.store(other, fewer_sessions(stored))
    killed = asyncio.Event()
    stream = LongStream(f"stream of the {pool} engine", LONG if pool == "greedy" else SHORT)

    async with asyncio.TaskGroup() as group:
        group.create_task(stream.continued(fleet.gateway, killed))
        await asyncio.wait_for(stream.begun.wait(), PATIENCE_SECONDS)
        assert stream.pool == pool
        group.create_task(fleet.play(fewer_sessions(stored)))
        playing = group.create_task(fleet.play_until(killed, f"{pool} killed"))
        await TRANSFERRING[fleet.pair.backend](fleet, pool)
        await asyncio.to_thread(kill, fleet.node, pod)
        killed.set()
    for moment in halting.MOMENTS:
        (fleet.requests[pool] / f"{moment}{halting.HALTED}").unlink(missing_ok=True)

    await asyncio.to_thread(fleet.restarted, pod, pool)
    await fleet.recover(f"{pool} engine killed during a write and a fetch", playing.result())
    await stream.check(fleet.engines["greedy"])


async def _halted(fleet: Fleet, pool: str) -> None:
    """Wait until threads of the engine have halted in the middle of a write and of a fetch."""
    requests = fleet.requests[pool]
    for moment in halting.MOMENTS:
        (requests / moment).touch()

    async def halted() -> bool:
        return all((requests / f"{moment}{halting.HALTED}").exists() for moment in halting.MOMENTS)

    await wait_until(halted, f"the {pool} engine has halted during a write and a fetch")
    assert list(fleet.pages.glob("*/*/*.tmp"))


async def _transferring(fleet: Fleet, pool: str) -> None:
    """Wait until the engine has written and fetched further pages. Mooncake's threads cannot be halted."""

    async def pages() -> list[float]:
        return [
            await metric(fleet.engines[pool], f"{PAGES}_total", outcome=outcome)
            for outcome in ("stored", "read")
        ]

    before = await pages()

    async def transferred() -> bool:
        return all(now > then for now, then in zip(await pages(), before, strict=True))

    await wait_until(transferred, f"the {pool} engine has written and fetched pages")


TRANSFERRING: Mapping[str, Callable[[Fleet, str], Awaitable[None]]] = {
    "File": _halted,
    "Mooncake": _transferring,
}
"""For each backend, how to wait for the moment at which a pool's engine is to be killed."""
