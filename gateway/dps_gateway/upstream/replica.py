"""One engine server, and whether it may receive requests. This module performs no I/O; it reads a clock.

Three independent mechanisms take a replica out of rotation. A failed connection or health check, or several health
checks without an answer in time, make it unavailable until a health check succeeds, which begins at once after a failed
connection. An engine whose API answers but whose scheduler generates nothing is hung until it generates a token.
Consecutive errors, or a high error rate, eject it for a backoff period, even if its health checks succeed; then a
single request probes it. Envoy's outlier detection is similar. The share of a replica that returns to service, and of a
new one, grows slowly, as in Envoy's slow start.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from dps_gateway.pool import replica_id
from dps_gateway.routing.decision import SINGLE_TOKENS, CacheUnits

LATE_CHECKS_TO_FAIL: Final = 3
"""Consecutive health checks without an answer in time after which a replica is unavailable.

A single late answer is not enough: if the gateway itself had no CPU time, the checks of all replicas are late.
"""

ERRORS_TO_EJECT: Final = 5
"""Consecutive 5xx answers and timeouts after which a replica is ejected."""

RATE_WINDOW: Final = 20
"""The number of most recent answers from which the error rate is computed."""

ERROR_RATE_TO_EJECT: Final = 0.5

FIRST_EJECTION_SECONDS: Final = 5.0
LONGEST_EJECTION_SECONDS: Final = 60.0

SMALLEST_WEIGHT: Final = 0.1
"""The share of a replica at the beginning of its slow start, relative to that of the others."""

OUTAGE_SECONDS: Final = 15.0
"""Time without an answer after which a replica begins a slow start when it answers again. After a shorter time, for
example because of one broken connection, it has probably not been restarted, and still holds its sessions' prefixes."""


class Wait(Protocol):
    """The wait of a request until its replica begins to answer, such as asyncio.Timeout."""

    def reschedule(self, when: float, /) -> None:
        """Set the time at which it ends."""


LOST_SECONDS: Final = 30.0
"""Time without an answer to a health check after which requests that the replica has not begun to answer are given up.
An engine that is only busy answers within this time."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests on an engine."""

    running: int = 0
    waiting: int = 0
    """Requests that wait in the engine's own queue."""
    waiting_tokens: int = 0
    """Tokens that the engine has to prefill for the waiting requests."""
    limit: int | None = None
    """Maximum number of requests that the engine runs at the same time; None if it does not report this."""
    free_tokens: int | None = None
    """Tokens of the KV cache that running requests do not occupy; None if the engine does not report this."""


NO_LOAD: Final = Load()


@dataclass(frozen=True, slots=True)
class Configuration:
    """What an engine reports about its configuration."""

    units: CacheUnits = SINGLE_TOKENS
    salt_header: str | None = None
    """The header from which it takes the cache salt of requests that have no field for it; None if it reads none."""
    max_running: int | None = None
    """Maximum number of requests that it runs at the same time; None if it does not report this."""


UNKNOWN: Final = Configuration()
"""The configuration of an engine that reports none."""


class Replica:
    """One engine server."""

    def __init__(
        self, url: str, clock: Callable[[], float] = time.monotonic, slow_start_seconds: float = 0.0
    ) -> None:
        """slow_start_seconds: the time after its start until it receives the same share of requests as the others."""
        self.url = url
        self.slow_start_seconds = slow_start_seconds
        self.id = replica_id(url)
        self.in_flight = 0
        self.waits: set[Wait] = set()
        """The waits of this process's requests that the engine has not begun to answer."""
        self.prefill_tokens = 0
        """Tokens to prefill for this process's streamed requests that the engine has not begun to answer."""
        self.begun_tokens = 0
        """The sum of these tokens over the requests that the engine has begun to answer."""
        self.other_load = NO_LOAD
        """The requests that other clients of the engine, such as other gateway replicas, had on it recently."""
        self.limit: int | None = None
        """The last limit that the engine reported."""
        self.free_tokens: int | None = None
        """The last number of free tokens that the engine reported."""
        self.configuration: Configuration | None = None
        """None until it is known, and again after the replica was unavailable, because an engine that has restarted may
        have a different configuration."""
        self.available = True
        """Whether the last connection or health check succeeded. It is true before the first check, and stays true
        until LATE_CHECKS_TO_FAIL checks are late."""
        self.suspected = False
        """Whether a connection to it has failed, and the health check that begins at once has not ended. It is not
        available meanwhile."""
        self.late_checks = 0
        """The number of most recent health checks that were not answered in time."""
        self.hung = False
        """Whether the engine answers health checks but generates nothing."""
        self._clock = clock
        self._answered_at = clock()
        self._token_at = clock()
        self._errors = 0
        self._recent: deque[bool] = deque(maxlen=RATE_WINDOW)
        """Whether each of the most recent answers was an error."""
        self._ejections = 0
        self._ejected_until: float | None = None
        """The end of the backoff of its ejection; None if a request has succeeded since, or it has not been ejected."""
        self._slow_start_began_at: float | None = None
        """None if it has had no slow start, or the slow start has ended."""

    @property
    def units(self) -> CacheUnits:
        """The units in which it caches and fetches tokens."""
        return (self.configuration or UNKNOWN).units

    @property
    def ejected(self) -> bool:
        """Whether it has been ejected and its backoff has not ended."""
        return self._ejected_until is not None and self._clock() < self._ejected_until

    @property
    def probing(self) -> bool:
        """Whether an ejection's backoff has ended, and no request has succeeded since."""
        return self._ejected_until is not None and not self.ejected

    @property
    def weight(self) -> float:
        """The share of requests, relative to that of other replicas, that it should receive: 1 except in slow start."""
        if self._slow_start_began_at is None:
            return 1.0
        seconds = self._clock() - self._slow_start_began_at
        if seconds >= self.slow_start_seconds:
            return 1.0
        return max(SMALLEST_WEIGHT, seconds / self.slow_start_seconds)

    def begin_slow_start(self) -> None:
        """Begin the slow start."""
        self._slow_start_began_at = self._clock()

    @property
    def silent_seconds(self) -> float:
        """The time since the engine last generated a token for this process, as far as is known."""
        return self._clock() - self._token_at

    @property
    def ready(self) -> bool:
        """Whether it may receive requests."""
        return self.available and not self.hung and not self.ejected

    @property
    def promising(self) -> bool:
        """Whether it is ready, or may be as soon as the health check after a failed connection has ended."""
        return (self.available or self.suspected) and not self.hung and not self.ejected

    @property
    def failing(self) -> bool:
        """Whether to eject it: after consecutive errors, a single one while it is probed, or at a high error rate."""
        if self.ejected:
            return False
        rate = sum(self._recent) / RATE_WINDOW if len(self._recent) == RATE_WINDOW else 0.0
        return self._errors >= (1 if self.probing else ERRORS_TO_EJECT) or rate >= ERROR_RATE_TO_EJECT

    @property
    def load(self) -> int:
        """Requests on the engine, as far as is known."""
        return self.in_flight + self.other_load.running + self.other_load.waiting

    @property
    def sent_tokens(self) -> int:
        """Tokens to prefill of all streamed requests that this process has sent."""
        return self.begun_tokens + self.prefill_tokens

    def begun_after(self, sent_tokens: int) -> int:
        """Tokens to prefill of the requests that were sent later, and that the engine has begun to answer.

        sent_tokens: the value of `sent_tokens` before they were sent. Engines prefill prompts in the order in which
        they arrive.
        """
        return max(0, self.begun_tokens - sent_tokens)

    def report(self, load: Load) -> None:
        """Record the load that the engine reports.

        The part that exceeds this process's own requests is attributed to other clients, and used until the next
        report. The process's own requests are counted exactly at any time.
        """
        own = self.in_flight
        waiting = min(load.waiting, max(0, load.running + load.waiting - own))
        running = max(0, load.running + load.waiting - own - waiting)
        self.limit = load.limit or self.limit
        self.free_tokens = load.free_tokens
        # The engine's estimate may exceed this process's, so the difference is meaningless without other requests.
        tokens = max(0, load.waiting_tokens - self.prefill_tokens) if running + waiting else 0
        self.other_load = Load(running, waiting, tokens)

    def answered(self) -> None:
        """Record a successful health check. A replica that was unavailable for some time begins a slow start."""
        if not self.available and self._clock() - self._answered_at >= OUTAGE_SECONDS:
            self.begin_slow_start()
        self.available = True
        self.suspected = False
        self.late_checks = 0
        self._answered_at = self._clock()

    @property
    def lost(self) -> bool:
        """Whether it has not responded for so long that its requests should be given up."""
        return self.hung or (
            self.late_checks >= LATE_CHECKS_TO_FAIL and self._clock() - self._answered_at >= LOST_SECONDS
        )

    def succeeded(self) -> None:
        """Record an answer that is not a server error."""
        self.answered()
        self._errors = 0
        if self.probing:
            self._ejected_until = None
            self.begin_slow_start()
        elif self._ejected_until is None and self.weight == 1.0:
            self._ejections, self._slow_start_began_at = 0, None
        if not self.ejected:
            self._recent.append(False)

    def errored(self) -> None:
        """Record a 5xx answer or a timeout."""
        if not self.ejected:
            self._errors += 1
            self._recent.append(True)

    def note_token(self) -> None:
        """Record that the engine has generated a token. A replica that was hung begins a slow start."""
        self._token_at = self._clock()
        if self.hung:
            self.hung = False
            self.begin_slow_start()

    def eject(self) -> float:
        """Take it out of rotation. Returns the backoff in seconds.

        It doubles with each ejection until the replica has had its full share again.
        """
        backoff = min(FIRST_EJECTION_SECONDS * 2.0**self._ejections, LONGEST_EJECTION_SECONDS)
        self._ejections += 1
        self._errors = 0
        self._recent.clear()
        self._ejected_until = self._clock() + backoff
        return backoff
