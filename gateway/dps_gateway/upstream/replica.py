"""One engine server, and whether it may receive requests. This module performs no I/O; it reads a clock.

Two independent mechanisms take a replica out of rotation. A failed connection or health check makes it unavailable
until a health check succeeds. Consecutive errors eject it for a backoff period, even if its health checks succeed;
then a single request probes it. Envoy's outlier detection is similar.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ERRORS_TO_EJECT: Final = 5
"""Consecutive 5xx answers and timeouts after which a replica is ejected."""

FIRST_EJECTION_SECONDS: Final = 5.0
LONGEST_EJECTION_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """The requests on an engine."""

    running: int = 0
    waiting: int = 0
    """Requests that wait in the engine's own queue."""
    waiting_tokens: int = 0
    """Tokens that the engine has to prefill for the waiting requests."""
    limit: int | None = None
    """Requests that the engine runs at the same time at most; None if it does not report this."""


NO_LOAD: Final = Load()


class Replica:
    """One engine server."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self.in_flight = 0
        self.prefill_tokens = 0
        """Uncached tokens of this process's streamed requests that the engine has not begun to answer."""
        self.others = NO_LOAD
        """The requests that other clients of the engine, such as other gateway replicas, had on it recently."""
        self.limit: int | None = None
        """The last limit that the engine reported."""
        self.available = True
        """Whether the last connection or health check succeeded. True before the first."""
        self.seen_ready = False
        """Whether it has ever answered. Until then it does not count towards the gateway's readiness."""
        self._clock = clock
        self._errors = 0
        self._ejections = 0
        self._ejected_until = 0.0

    @property
    def ejected(self) -> bool:
        """Whether it has been ejected and its backoff has not ended."""
        return self._ejections > 0 and self._clock() < self._ejected_until

    @property
    def probing(self) -> bool:
        """Whether an ejection's backoff has ended, and no request has succeeded since."""
        return self._ejections > 0 and not self.ejected

    @property
    def ready(self) -> bool:
        """Whether it may receive requests."""
        return self.available and not self.ejected

    @property
    def failing(self) -> bool:
        """Whether it should be ejected: after consecutive errors, or after a single one while it is probed."""
        return not self.ejected and self._errors >= (1 if self.probing else ERRORS_TO_EJECT)

    def accepts(self, max_in_flight: int) -> bool:
        """Whether it may receive one more request. While it is probed, only one is in flight."""
        return self.ready and self.in_flight < (1 if self.probing else max_in_flight)

    def report(self, load: Load) -> None:
        """Record the load that the engine reports. What exceeds this process's own requests is that of other clients.

        The difference remains valid until the next report, while the own requests are counted exactly at any time.
        """
        own = self.in_flight
        waiting = min(load.waiting, max(0, load.running + load.waiting - own))
        running = max(0, load.running + load.waiting - own - waiting)
        self.limit = load.limit or self.limit
        self.others = Load(running, waiting, max(0, load.waiting_tokens - self.prefill_tokens))

    def succeeded(self) -> None:
        """Record an answer that is not a server error."""
        self.available = self.seen_ready = True
        self._errors = 0
        if self.probing:
            self._ejections = 0

    def errored(self) -> None:
        """Record a 5xx answer or a timeout."""
        if not self.ejected:
            self._errors += 1

    def eject(self) -> float:
        """Take it out of rotation. Returns the backoff in seconds, which doubles with each consecutive ejection."""
        backoff = min(FIRST_EJECTION_SECONDS * 2.0**self._ejections, LONGEST_EJECTION_SECONDS)
        self._ejections += 1
        self._errors = 0
        self._ejected_until = self._clock() + backoff
        return backoff
