"""A circuit breaker: after consecutive failures, reject calls for a while, then allow a single probe."""

import time
from collections.abc import Callable
from typing import Final

FAILURES_TO_OPEN: Final = 3
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 5.0


class Breaker:
    """Closed: calls pass. Open: calls are rejected until the pause ends; then one probe closes or reopens it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._retry_at = 0.0

    @property
    def open(self) -> bool:
        return self._failures >= FAILURES_TO_OPEN

    def allows(self) -> bool:
        """Whether a call may be made now. If the breaker is open and the call is allowed, the call is the probe."""
        if not self.open:
            return True
        if self._clock() < self._retry_at:
            return False
        self._retry_at = self._clock() + self._pause
        return True

    def succeeded(self) -> None:
        self._failures = 0
        self._pause = FIRST_PAUSE_SECONDS

    def failed(self) -> None:
        self._failures += 1
        if self.open:
            self._retry_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
