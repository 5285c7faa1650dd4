"""Supervision of background tasks."""

import asyncio

import pytest

from dps_gateway.app import supervise
from dps_gateway.telemetry.metrics import Metrics


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
async def test_task_that_ends_is_logged_counted_and_restarted(
    caplog: pytest.LogCaptureFixture, raises: bool
) -> None:
    metrics, runs = Metrics(), 0
    restarted = asyncio.Event()

    async def task() -> None:
        nonlocal runs
        runs += 1
        if runs == 3:
            restarted.set()
            await asyncio.Event().wait()
        if raises:
            raise ValueError("a bug")

    supervisor = asyncio.create_task(supervise("watch", task, metrics, restart_seconds=0))
    await asyncio.wait_for(restarted.wait(), 5)
    supervisor.cancel()
    await asyncio.gather(supervisor, return_exceptions=True)
    assert metrics.registry.get_sample_value("dps_background_failures_total", {"task": "watch"}) == 2
    assert [record.getMessage().split("; ")[1] for record in caplog.records] == ["restarting it"] * 2
