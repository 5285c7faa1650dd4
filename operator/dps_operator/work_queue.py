"""The queue of DPSRouters to reconcile. A key is never reconciled concurrently; failures are retried with backoff."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from prometheus_client import Counter, Gauge, Histogram

from dps_operator.errors import ClusterError
from dps_operator.objects import Key

RECONCILES = Counter("dps_operator_reconcile_total", "Reconciles of a DPSRouter", ["outcome"])
RECONCILE_SECONDS = Histogram("dps_operator_reconcile_seconds", "Duration of a reconcile")
WAITING = Gauge("dps_operator_queue_length", "DPSRouters waiting to be reconciled")
FAILED = Gauge(
    "dps_operator_failed_passes",
    "Consecutive failed reconciles of a DPSRouter",
    ["router_namespace", "router"],
)

INITIAL_BACKOFF, MAX_BACKOFF = 0.5, 60.0
"""Seconds before the first retry, doubled after each failure up to the maximum."""
DEBOUNCE_SECONDS = 0.1
"""Seconds that a key waits for further events, because one apply causes several."""

log = logging.getLogger(__name__)


class WorkQueue:
    """Keys wait until a worker is free. A key that is added while it is being reconciled is reconciled once more."""

    def __init__(self, work: Callable[[Key], Awaitable[None]]) -> None:
        self._work = work
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: dict[Key, asyncio.TimerHandle | None] = {}
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self.running: dict[Key, float] = {}
        """Monotonic start time of each running reconcile."""

    def add(self, key: Key, delay: float = DEBOUNCE_SECONDS) -> None:
        """Reconcile `key` after `delay` seconds, or earlier if an earlier request is pending."""
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
        """Run one worker until cancelled."""
        while True:
            key = await self._ready.get()
            self._waiting.pop(key, None)
            WAITING.set(len(self._waiting))
            self.running[key] = time.monotonic()
            delay: float | None = None
            try:
                with RECONCILE_SECONDS.time():
                    await self._work(key)
                self._failures.pop(key, None)
                FAILED.remove(*key)
                RECONCILES.labels("done").inc()
            except ClusterError as error:
                delay = self._backoff(key, error.retry_after)
                log.warning("%s/%s: %s; retrying in %.1f s", *key, error, delay)
                RECONCILES.labels("retry").inc()
            except Exception:
                delay = self._backoff(key, None)
                log.exception("%s/%s: reconcile failed; retrying in %.1f s", *key, delay)
                RECONCILES.labels("error").inc()
            finally:
                del self.running[key]
            if key in self._again:
                self._again.discard(key)
                self.add(key, DEBOUNCE_SECONDS if delay is None else delay)
            elif delay is not None:
                self.add(key, delay)

    def _backoff(self, key: Key, retry_after: float | None) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        FAILED.labels(*key).set(failures)
        delay = INITIAL_BACKOFF * 2.0 ** min(failures - 1, 16)
        return max(min(delay, MAX_BACKOFF), retry_after or 0.0)

    def oldest_age(self) -> float:
        """Age of the oldest running reconcile in seconds; 0 if there is none."""
        return max((time.monotonic() - began for began in self.running.values()), default=0.0)
