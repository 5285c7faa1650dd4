"""Damages the directory of a common prefix cache while engines use it."""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

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
