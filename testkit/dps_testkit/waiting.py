"""Waiting for a condition, with a time limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dps_testkit.errors import RefusedError

PATIENCE_SECONDS = 100.0
"""The default time limit is long, because the machine may be busy."""
POLL_SECONDS = 0.2
FAST_POLL_SECONDS = 0.03
"""The interval for conditions that are cheap to check and that a test must observe quickly."""
TLS_CLOSE_SECONDS = 1.0
_NOT_YET = (AssertionError, KeyError, RefusedError)

T = TypeVar("T")


def eventually(check: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """Return what `check` returns once it raises neither AssertionError, KeyError nor RefusedError.

    Raises the last of these errors if `check` still fails after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check()
        except _NOT_YET:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


async def eventually_async(check: Callable[[], Awaitable[T]], seconds: float = PATIENCE_SECONDS) -> T:
    """Like `eventually`, for a coroutine function."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await check()
        except _NOT_YET:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(POLL_SECONDS)


async def wait_until(condition: Callable[[], Awaitable[bool]], description: str) -> None:
    """Wait until `condition` is true. Raises AssertionError with `description` after PATIENCE_SECONDS.

    Errors raised by `condition` are not retried.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await condition():
        assert time.monotonic() < deadline, f"timed out after {PATIENCE_SECONDS:.0f} s: {description}"
        await asyncio.sleep(FAST_POLL_SECONDS)


async def tls_connections_closed() -> None:
    """Wait until the TLS connections of cancelled requests are closed, which takes iterations of the event loop."""
    await asyncio.sleep(TLS_CLOSE_SECONDS)
