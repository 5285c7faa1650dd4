"""The clock of an emulated engine: scaled real time. Tests replace it."""

import asyncio
import time


class Clock:
    """A clock in emulated seconds: real time, `speed` times faster.

    An event loop cannot sleep for much less than a millisecond, but at high speed a decode step is far
    shorter. Each sleep therefore ends at a deadline computed from the previous deadline, not from now: short
    sleeps only yield, longer ones compensate for earlier oversleeping, and the mean rate is correct. If the
    process falls behind, it makes up for at most `MAX_DEBT_SECONDS` of real time.
    """

    MAX_DEBT_SECONDS = 0.05
    SHORTEST_SLEEP_SECONDS = 0.001

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start = time.perf_counter()
        self._deadline = self._start

    def now(self) -> float:
        """Emulated seconds since the clock was created."""
        return (time.perf_counter() - self._start) * self._speed

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds` of emulated time."""
        real_now = time.perf_counter()
        self._deadline = max(self._deadline, real_now - self.MAX_DEBT_SECONDS) + seconds / self._speed
        left = self._deadline - real_now
        await asyncio.sleep(left if left >= self.SHORTEST_SLEEP_SECONDS else 0)

    async def wait(self, seconds: float) -> None:
        """Wait for `seconds` of emulated time while the engine executes steps."""
        await asyncio.sleep(seconds / self._speed)

    def idle(self) -> None:
        """Drop the previous deadline, so that later sleeps do not make up for idle time."""
        self._deadline = max(self._deadline, time.perf_counter())
