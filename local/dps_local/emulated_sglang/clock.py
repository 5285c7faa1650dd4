"""Emulated time: scaled real time for a server, virtual time for tests and simulation."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A clock in emulated seconds."""

    def now(self) -> float:
        """Emulated seconds since the clock was made."""

    async def sleep(self, seconds: float) -> None:
        """Return when `seconds` of emulated time have passed."""

    def idle(self) -> None:
        """The engine had nothing to do until now."""


class ScaledClock:
    """Real time, `speed` times faster.

    An event loop cannot sleep for much less than a millisecond, and a decode step at high speed is far
    shorter. So a sleep ends at a deadline reckoned from the previous deadline, not from now: short sleeps
    only yield, long ones make up for what earlier ones overslept, and the mean rate is right. A process
    that cannot keep up does not owe more than `MAX_DEBT_SECONDS` of real time.
    """

    MAX_DEBT_SECONDS = 0.05
    SHORTEST_SLEEP_SECONDS = 0.001

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start = time.perf_counter()
        self._deadline = self._start

    def now(self) -> float:
        return (time.perf_counter() - self._start) * self._speed

    async def sleep(self, seconds: float) -> None:
        real_now = time.perf_counter()
        self._deadline = max(self._deadline, real_now - self.MAX_DEBT_SECONDS) + seconds / self._speed
        left = self._deadline - real_now
        await asyncio.sleep(left if left >= self.SHORTEST_SLEEP_SECONDS else 0)

    def idle(self) -> None:
        """Forget the previous deadline: time in which nothing was asked for is not time to make up for."""
        self._deadline = max(self._deadline, time.perf_counter())


class VirtualClock:
    """Time that passes only by sleeping: exact and immediate, for one sleeper."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        await asyncio.sleep(0)

    def idle(self) -> None:
        """Nothing is owed in virtual time."""
