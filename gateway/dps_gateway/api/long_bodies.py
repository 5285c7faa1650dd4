"""Work on request bodies so long that it would delay other requests."""

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

LONG_BODY_BYTES: Final = 256 * 1024
"""Rendering the chat of a body of this size can take more than 10 ms."""

P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(raw: bytes, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work` on the body `raw`, which is done in a thread if the body is long.

    Parsing and serializing JSON hold Python's interpreter lock, so other requests wait for each of these steps, but are
    served between them.
    """
    if len(raw) < LONG_BODY_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
