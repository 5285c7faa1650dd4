"""The queue of DPSRouters to reconcile: each at most once at a time, failures again after a growing pause."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from prometheus_client import Counter, Gauge, Histogram

from dps_operator.errors import ClusterError
from dps_operator.observe import Key

RECONCILES = Counter("dps_operator_reconcile_total", "Passes over a DPSRouter", ["outcome"])
RECONCILE_SECONDS = Histogram("dps_operator_reconcile_seconds", "Duration of a pass")
WAITING = Gauge("dps_operator_queue_length", "DPSRouters that wait for a pass")
FAILED = Gauge(
    "dps_operator_failed_passes",
    "Passes over a DPSRouter that failed since its last good one",
    ["router_namespace", "router"],
)

INITIAL_BACKOFF, MAX_BACKOFF = 0.5, 60.0
"""Seconds before the first repetition, which doubles up to the longest."""
DEBOUNCE_SECONDS = 0.1
"""Seconds that a key waits for more events: one apply is answered by several."""

log = logging.getLogger(__name__)


class WorkQueue:
    """Keys wait here until a worker is free. A key that is added while it is worked on comes once more."""

    def __init__(self, work: Callable[[Key], Awaitable[None]]) -> None:
        self._work = work
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: dict[Key, asyncio.TimerHandle | None] = {}
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self.running: dict[Key, float] = {}
        """When the passes that are under way began, by the monotonic clock."""

    def add(self, key: Key, delay: float = DEBOUNCE_SECONDS) -> None:
        """Ask for a pass over `key` in `delay` seconds. The soonest request counts."""
        if key in self.running:
            self._again.add(key)
            return
        loop = asyncio.get_running_loop()
        if key in self._waiting:
            timer = self._waiting[key]
            if timer is None or timer.when() <= loop.time() + delay:
                return
            timer.cancel()
        self._waiting[key] = loop.call_later(delay, self._due, key)
        WAITING.set(len(self._waiting))

    def _due(self, key: Key) -> None:
        self._waiting[key] = None
        self._ready.put_nowait(key)

    async def work(self) -> None:
        """One worker, for ever."""
        while True:
            key = await self._ready.get()
            self._waiting.pop(key, None)
            WAITING.set(len(self._waiting))
            self.running[key] = time.monotonic()
            pause: float | None = None
            try:
                with RECONCILE_SECONDS.time():
                    await self._work(key)
                self._failures.pop(key, None)
                FAILED.remove(*key)
                RECONCILES.labels("done").inc()
            except ClusterError as error:
                pause = self._backoff(key, error.retry_after)
                log.warning("%s/%s: %s; again in %.1f s", *key, error, pause)
                RECONCILES.labels("retry").inc()
            except Exception:
                pause = self._backoff(key, None)
                log.exception("%s/%s: again in %.1f s", *key, pause)
                RECONCILES.labels("error").inc()
            finally:
                del self.running[key]
            if key in self._again:
                self._again.discard(key)
                self.add(key, DEBOUNCE_SECONDS if pause is None else pause)
            elif pause is not None:
                self.add(key, pause)

    def _backoff(self, key: Key, asked: float | None) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        FAILED.labels(*key).set(failures)
        pause = INITIAL_BACKOFF * 2.0 ** min(failures - 1, 16)
        return max(min(pause, MAX_BACKOFF), asked or 0.0)

    def oldest_age(self) -> float:
        """Seconds since the oldest pass under way began; 0 where none is."""
        return max((time.monotonic() - began for began in self.running.values()), default=0.0)
