"""An SGLang plugin that skips or halts refills by the draft model of a STANDALONE engine, on request.

The environment variable REFILL_CONTROL names a folder. While it contains the file SKIP, draft models do not prefill
what was fetched. While it contains the file HALT, a refill halts after its first chunk until the engine has
received an abort of the request.
"""

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "REFILL_CONTROL"
SKIP, HALT = "skip", "halt"
ABORTED, HALTED = ".aborted", ".halted"
"""Suffixes of files that are named after a request: the engine has received its abort; its refill has halted before."""
ABORT = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"
POLL_SECONDS = 0.01
HALT_SECONDS = 60.0


@contextlib.contextmanager
def requested(folder: Path, request: str) -> Iterator[None]:
    """SKIP or HALT refills until the block exits."""
    (folder / request).touch()
    try:
        yield
    finally:
        (folder / request).unlink()


async def leave_during_a_refill(folder: Path, answers: Awaitable[object]) -> list[str]:
    """Close the connections of these requests while the refill of one of them is halted, and wait until it was aborted.

    Returns the requests whose refills were halted until then.
    """
    # Not at the top of the module, which SGLang's interpreter imports.
    from dps_testkit.waiting import wait_until

    async def halted() -> bool:
        return bool(_halted(folder))

    async def aborted() -> bool:
        return all((folder / f"{request}{ABORTED}").exists() for request in _halted(folder))

    with requested(folder, HALT):
        sending = asyncio.ensure_future(answers)
        await wait_until(halted, "the draft model has prefilled a part of a fetched prefix")
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        await wait_until(aborted, "the engine has received the abort of the request")
    return _halted(folder)


def _halted(folder: Path) -> list[str]:
    return [file.stem for file in folder.glob(f"*{HALTED}")]


def register() -> None:
    """Called by SGLang in each of its processes."""
    folder = Path(os.environ[VARIABLE])
    if multiprocessing.parent_process() is None:  # serves HTTP
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(ABORT, reported(folder), HookType.AROUND)
        return
    from dps_sglang import draft_refill  # which needs torch

    # By name, because mypy permits no assignment to a function.
    first = draft_refill.first_fetched_token
    setattr(draft_refill, "needs_refill", unless_skipped(folder, draft_refill.needs_refill))  # noqa: B010
    setattr(draft_refill, "_chunk", halting(folder, first, draft_refill._chunk))  # noqa: B010


def unless_skipped(folder: Path, needs_refill: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a request needs a refill, or False while refills are to be skipped."""
    return lambda request: not (folder / SKIP).exists() and needs_refill(request)


def reported(folder: Path) -> Callable[..., Any]:
    """A wrapper for the method that tells the scheduler to abort a request."""

    def wrapper(original: Callable[..., Any], self: Any, rid: str = "", abort_all: bool = False) -> Any:
        result = original(self, rid, abort_all)
        if rid:
            (folder / f"{rid}{ABORTED}").touch()
        return result

    return wrapper


def halting(
    folder: Path, first_fetched_token: Callable[[Any], int], prepare: Callable[..., Any]
) -> Callable[..., Any]:
    """The function that prepares a chunk of a refill. It halts, if requested, before every chunk but the first."""

    def prepare_chunk(batch: Any, row: int, request: Any, tokens: list[int], start: int, end: int) -> Any:
        aborted = folder / f"{request.rid}{ABORTED}"
        if start > first_fetched_token(request) and (folder / HALT).exists() and not aborted.exists():
            (folder / f"{request.rid}{HALTED}").touch()
            deadline = time.monotonic() + HALT_SECONDS
            while not aborted.exists() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        return prepare(batch, row, request, tokens, start, end)

    return prepare_chunk
