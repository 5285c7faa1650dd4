"""Clocks whose time the tests determine."""

import asyncio

from dps_local.emulated_sglang.clock import Clock


class ManualClock:
    """Call it for the time in seconds. Tests change `now`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class VirtualClock(Clock):
    """The clock of an emulated engine. Time passes only in `sleep`, which returns immediately.

    Supports one sleeping task.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        await asyncio.sleep(0)

    async def wait(self, seconds: float) -> None:
        await self.sleep(seconds)

    def idle(self) -> None:
        """Do nothing: virtual time has no deadlines."""
