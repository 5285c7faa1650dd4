"""Full listings: at the start, so that the first pass knows everything, and slowly ever after."""

import asyncio
import logging
import time

from prometheus_client import Gauge

from dps_operator.cluster import Cluster
from dps_operator.errors import ClusterError, NotInstalledError
from dps_operator.kinds import CHILDREN, POD, ROUTER, Kind
from dps_operator.observe import Observations
from dps_operator.resources import OWNED_SELECTOR, Manifest
from dps_operator.settings import Settings
from dps_operator.work_queue import WorkQueue

INITIAL_BACKOFF, MAX_BACKOFF = 1.0, 30.0
DISCOVERY_SECONDS = 15.0
"""Seconds between two looks for a kind that was not installed."""
FAILING = Gauge(
    "dps_operator_listing_failing", "1 while the API server does not list what the operator needs"
)

log = logging.getLogger(__name__)


class Resync:
    """Lists everything, replaces what was remembered, and asks for a pass over every DPSRouter.

    It mends whatever a watch has missed, so a watch that died in silence costs at most one interval.
    """

    def __init__(
        self, cluster: Cluster, observations: Observations, queue: WorkQueue, settings: Settings
    ) -> None:
        self._cluster = cluster
        self._observations = observations
        self._queue = queue
        self._settings = settings
        self.alive = time.monotonic()
        """When the loop last came round, by the monotonic clock."""
        self.complete = asyncio.Event()
        """Set once the first listing is in."""
        self.installed: tuple[Kind, ...] = CHILDREN
        """The kinds of children that the API server knows."""
        self.changed = asyncio.Event()
        """Set when `installed` has changed."""

    async def _list(self, kind: Kind, selector: str = "") -> list[Manifest] | None:
        """All objects of a kind; None where its CRD is not installed."""
        found: list[Manifest] = []
        for namespace in self._settings.namespaces or (None,):
            try:
                items = await self._cluster.list(kind, namespace, selector)
            except NotInstalledError:
                return None
            # The items of a list do not say what they are.
            identity = {"apiVersion": kind.api_version, "kind": kind.name}
            found += [identity | item for item in items]
        return found

    async def once(self) -> None:
        """One full listing. ClusterError where the API server does not answer: nothing is forgotten then."""
        found = {kind: await self._list(kind, OWNED_SELECTOR) for kind in CHILDREN}
        children = [item for items in found.values() for item in items or []]
        pods = await self._list(POD, OWNED_SELECTOR) or []
        self._observations.replace(await self._list(ROUTER) or [], children, pods)
        installed = tuple(kind for kind, items in found.items() if items is not None)
        if installed != self.installed:
            self.installed = installed
            self.changed.set()
        for key in list(self._observations.routers):
            self._queue.add(key)

    async def new_kind_installed(self) -> bool:
        """Whether a kind is there now that the last listing missed."""
        for kind in CHILDREN:
            if kind in self.installed:
                continue
            try:
                if await self._list(kind, OWNED_SELECTOR) is not None:
                    return True
            except ClusterError as error:
                log.debug("looking for %s failed: %s", kind.name, error)
        return False

    async def _wait(self, seconds: float) -> None:
        """Wait for the next listing, but no longer than until a missing kind has been installed."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, DISCOVERY_SECONDS))
            if left > DISCOVERY_SECONDS and await self.new_kind_installed():
                return

    async def run(self) -> None:
        """List for ever, soon again after a failure."""
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
                log.warning("listing failed: %s; again in %.0f s", error, retry)
                pause, retry = retry, min(retry * 2, MAX_BACKOFF)
            await self._wait(pause)
