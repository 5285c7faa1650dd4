"""Clocks in emulated time."""

import asyncio

from dps_local.emulated_sglang.clock import ScaledClock
from dps_testkit.clock import VirtualClock


async def test_virtual_time_passes_only_in_sleep() -> None:
    clock = VirtualClock()
    await clock.sleep(100.0)
    await clock.sleep(0.5)
    await asyncio.sleep(0)
    assert clock.now() == 100.5


async def test_scaled_clock_oversleeps_by_at_most_the_sleep_granularity() -> None:
    clock = ScaledClock(speed=1000.0)
    slept = 0.0
    for _ in range(200):
        await clock.sleep(0.1)
        slept += 0.1
    assert clock.now() > slept - 1000 * ScaledClock.SHORTEST_SLEEP_SECONDS
