"""A log for messages about a condition that can hold for many requests at once."""

import logging
import time
from collections.abc import Callable
from typing import Final

INTERVAL_SECONDS: Final = 10.0


class LimitedLog:
    """Logs errors, at most one in INTERVAL_SECONDS."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged: float | None = None

    def error(self, message: str, *arguments: object) -> None:
        """Log an error, unless one was logged shortly before."""
        now = self._clock()
        if self._logged is None or now - self._logged >= INTERVAL_SECONDS:
            self._logged = now
            self._log.error(message, *arguments)
