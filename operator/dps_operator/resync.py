"""Full listings: at startup, before the first reconcile, and then periodically."""

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import Gauge

from dps_operator.cluster import Cluster
from dps_operator.errors import ClusterError, NotInstalledError
from dps_operator.kinds import CHILDREN, POD, ROUTER, Kind
from dps_operator.observe import Observations
from dps_operator.resources import OWNED_SELECTOR, Manifest
from dps_operator.settings import Settings
from dps_operator.work_queue import WorkQueue

INITIAL_BACKOFF, MAX_BACKOFF = 1.0, 30.0
"""Seconds before a failed listing is repeated, doubled after each failure up to the maximum."""
DISCOVERY_SECONDS = 15.0
"""Seconds between checks for kinds that were not installed."""
FAILING = Gauge("dps_operator_listing_failing", "1 while listing the required kinds fails")

log = logging.getLogger(__name__)


def _keep(found: Manifest, keep: Callable[[Manifest], object]) -> None:
    """Pass an object to `keep`. One that it cannot read is left out, so that one object cannot stop the operator."""
    try:
        keep(found)
    except Exception:
        metadata = found.get("metadata", {})
        log.exception(
            "%s %s/%s cannot be read", found["kind"], metadata.get("namespace"), metadata.get("name")
        )


class Resync:
    """Lists all objects, replaces the cache, and enqueues every DPSRouter.

    Recovers events that a watch has missed, so a stalled watch delays a change by at most one interval.
    """

    def __init__(
        self, cluster: Cluster, observations: Observations, queue: WorkQueue, settings: Settings
    ) -> None:
        self._cluster = cluster
        self._observations = observations
        self._queue = queue
        self._settings = settings
        self.alive = time.monotonic()
        """Monotonic time of the loop's last iteration."""
        self.complete = asyncio.Event()
        """Set after the first complete listing."""
        self.installed: tuple[Kind, ...] = CHILDREN
        """The kinds of children that the API server serves."""
        self.changed = asyncio.Event()
        """Set when `installed` changes."""

    async def _read(self, kind: Kind, keep: Callable[[Manifest], object], selector: str = "") -> bool:
        """Pass all objects of a kind to `keep`. Returns False if its CRD is not installed.

        An object is released before the next one is passed, so that memory does not grow with the number of objects.
        """
        # List items have no apiVersion and kind.
        identity = {"apiVersion": kind.api_version, "kind": kind.name}
        try:
            for namespace in self._settings.namespaces or (None,):
                async for page in self._cluster.pages(kind, namespace, selector):
                    while page:
                        _keep(identity | page.pop(), keep)
        except NotInstalledError:
            return False
        return True

    async def once(self) -> None:
        """One full listing, after which every DPSRouter is reconciled.

        Those that were deleted without an event are included, so that what was kept for them is removed. Raises
        ClusterError if a request fails, and then leaves the cache unchanged.
        """
        found = Observations()
        with self._observations.repeats_changes():
            installed = tuple(
                [kind for kind in CHILDREN if await self._read(kind, found.update_child, OWNED_SELECTOR)]
            )
            await self._read(POD, found.update_pod, OWNED_SELECTOR)
            await self._read(ROUTER, found.update_router)
            keys = self._observations.routers.keys() | found.routers.keys()
            self._observations.replace(found)
        if installed != self.installed:
            self.installed = installed
            self.changed.set()
        for key in keys:
            self._queue.add(key)

    async def new_kind_installed(self) -> bool:
        """Whether a kind that was missing in the last listing is now installed."""
        for kind in CHILDREN:
            if kind in self.installed:
                continue
            try:
                if await self._read(kind, lambda found: None, OWNED_SELECTOR):
                    return True
            except ClusterError as error:
                log.debug("checking for %s failed: %s", kind.name, error)
        return False

    async def _wait(self, seconds: float) -> None:
        """Wait for the next listing; return early if a missing kind has been installed."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, DISCOVERY_SECONDS))
            if left > DISCOVERY_SECONDS and await self.new_kind_installed():
                return

    async def run(self) -> None:
        """List periodically, with backoff after failures."""
        retry = INITIAL_BACKOFF
        while True:
            self.alive = time.monotonic()
            try:
                await self.once()
                self.complete.set()
                FAILING.set(0)
                retry, pause = INITIAL_BACKOFF, self._settings.resync_seconds
            except ClusterError as error:
                FAILING.set(1)
                log.warning("listing failed: %s; retrying in %.0f s", error, retry)
                pause, retry = retry, min(retry * 2, MAX_BACKOFF)
            await self._wait(pause)
