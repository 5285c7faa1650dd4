"""Tasks that are cancelled when a scope ends, although some suppress cancellation."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from dps_operator.task_scope import task_scope

pytestmark = pytest.mark.asyncio


def start(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task. The caller need not keep a reference to it, because the scope does."""
    return asyncio.create_task(coroutine)


async def cancelled_after(iterations: int, block: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a block in a task, and cancel it after this many iterations of the event loop."""
    task = asyncio.create_task(block())
    for _ in range(iterations):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def forever() -> None:
    await asyncio.Event().wait()


async def closing_only_when_its_cleanup_is_cancelled() -> None:
    """When cancelled, wait for a cleanup that must be cancelled, too. Kopf's watchers may end in this way."""
    try:
        await forever()
    finally:
        cleanup = asyncio.create_task(forever())
        while not cleanup.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(cleanup)


async def starting() -> None:
    await asyncio.gather(forever(), closing_only_when_its_cleanup_is_cancelled())


async def test_all_tasks_started_within_the_block_have_ended_after_it() -> None:
    before = asyncio.all_tasks()
    async with task_scope():
        for function in (forever, closing_only_when_its_cleanup_is_cancelled, starting):
            start(function())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks() - before) == 5
    assert asyncio.all_tasks() == before


async def test_tasks_ended_after_a_failure_of_the_block() -> None:
    before = asyncio.all_tasks()

    async def block() -> None:
        async with task_scope():
            start(forever())
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        await block()
    assert asyncio.all_tasks() == before


async def test_tasks_that_other_code_starts_meanwhile_go_on() -> None:
    started, others = asyncio.Event(), []

    async def other() -> None:
        await started.wait()
        others.append(asyncio.create_task(forever()))

    outside = asyncio.create_task(other())
    async with task_scope():
        started.set()
        await outside
    assert [task.done() for task in others] == [False]
    others[0].cancel()


async def test_cancelling_the_block_ends_its_tasks() -> None:
    before = asyncio.all_tasks()

    async def block() -> None:
        async with task_scope():
            await starting()

    await cancelled_after(1, block)
    assert asyncio.all_tasks() == before


async def test_tasks_are_ended_although_the_caller_is_cancelled_meanwhile() -> None:
    before = asyncio.all_tasks()

    async def block() -> None:
        async with task_scope():
            start(closing_only_when_its_cleanup_is_cancelled())
            await asyncio.sleep(0)

    await cancelled_after(4, block)
    assert asyncio.all_tasks() == before


async def test_a_task_is_cancelled_before_those_that_it_has_started() -> None:
    cancelled = []

    async def child() -> None:
        try:
            await forever()
        finally:
            cancelled.append("child")

    async def parent() -> None:
        started = asyncio.create_task(child())
        try:
            await forever()
        finally:
            cancelled.append("parent")
            started.cancel()

    async with task_scope():
        start(parent())
        for _ in range(3):
            await asyncio.sleep(0)
    assert cancelled == ["parent", "child"]
