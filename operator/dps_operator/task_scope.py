"""Ends all tasks that a block of code has started, including those that a library started for it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

ROUND_SECONDS: Final = 0.2
ROUNDS: Final = 50

_scope: ContextVar[set[asyncio.Task[Any]] | None] = ContextVar("scope", default=None)

T = TypeVar("T")

log = logging.getLogger(__name__)


@asynccontextmanager
async def task_scope() -> AsyncIterator[None]:
    """Cancel the tasks that were started within the block, directly or by other such tasks, when the block exits.

    Tasks that are still running are cancelled again, because a task may suppress its cancellation or start a further
    task in response. After ROUNDS rounds, the remaining tasks are logged and left alone. Tasks that other code starts
    at the same time are not affected. Nested scopes are not supported.
    """
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[Any]] = set()
    factory, token = loop.get_task_factory(), _scope.set(tasks)
    loop.set_task_factory(_create_task)
    try:
        yield
    finally:
        _scope.reset(token)
        await _cancel(tasks)
        loop.set_task_factory(factory)


def _create_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
    **options: Any,
) -> asyncio.Task[T]:
    task = asyncio.Task(coroutine, loop=loop, **options)
    tasks = _scope.get()
    if tasks is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_retrieve_exception)
    return task


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Mark the exception as retrieved, so that asyncio does not log it when the task is destroyed."""
    if not task.cancelled():
        task.exception()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for _ in range(ROUNDS):
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tuple(tasks), timeout=ROUND_SECONDS)
    for task in tasks:
        log.error("task did not stop: %r", task)
