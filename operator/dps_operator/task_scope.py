"""Ends all tasks that a block of code has started, including those that a library started for it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

ROUND_SECONDS: Final = 0.2
"""Time for cancelled tasks to end before they are cancelled again, in seconds."""
ROUNDS: Final = 25
"""How often tasks are cancelled."""

Tasks = dict[asyncio.Task[Any], None]
"""Running tasks in the order in which they were started."""

_scope: ContextVar[Tasks | None] = ContextVar("scope", default=None)

T = TypeVar("T")

log = logging.getLogger(__name__)


@asynccontextmanager
async def task_scope() -> AsyncIterator[None]:
    """Cancel the tasks that were started within the block, directly or by other such tasks, when the block exits.

    Tasks that are still running are cancelled again, because a task may suppress its cancellation or start a further
    task in response. After ROUNDS rounds, the remaining tasks are logged and left running. This continues even
    if the caller is cancelled. Tasks that other code starts at the same time are not affected. Scopes cannot be nested.
    """
    loop = asyncio.get_running_loop()
    tasks: Tasks = {}
    factory, token = loop.get_task_factory(), _scope.set(tasks)
    loop.set_task_factory(_create_task)
    try:
        yield
    finally:
        _scope.reset(token)
        cancelling = asyncio.create_task(_cancel(tasks))
        try:
            await asyncio.shield(cancelling)
        finally:
            await cancelling
            loop.set_task_factory(factory)


def _create_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
    **options: Any,
) -> asyncio.Task[T]:
    task = asyncio.Task(coroutine, loop=loop, **options)
    tasks = _scope.get()
    if tasks is not None:
        tasks[task] = None
        task.add_done_callback(lambda ended: _forget(tasks, ended))
    return task


def _forget(tasks: Tasks, task: asyncio.Task[Any]) -> None:
    """Remove an ended task. Its exception is marked as retrieved, so that asyncio does not log it."""
    del tasks[task]
    if not task.cancelled():
        task.exception()


async def _cancel(tasks: Tasks) -> None:
    for _ in range(ROUNDS):
        if not tasks:
            return
        # The oldest first: a watcher of Kopf ignores its cancellation if a task that it started has ended before.
        for task in tuple(tasks):
            task.cancel()
            await asyncio.sleep(0)
        if tasks:
            await asyncio.wait(tuple(tasks), timeout=ROUND_SECONDS)
    for task in tasks:
        log.error("task did not stop: %r", task)
