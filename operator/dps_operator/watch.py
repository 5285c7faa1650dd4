"""Updates the cache: the handlers that Kopf calls for each event of a watch, and full listings."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import kopf
from prometheus_client import Gauge

from dps_operator.errors import ClusterError, NotInstalledError
from dps_operator.kube import Cluster
from dps_operator.objects import CHILDREN, OWNED_SELECTOR, POD, ROUTER, Key, Kind, Manifest
from dps_operator.observe import Observations
from dps_operator.settings import Settings
from dps_operator.work_queue import WorkQueue

BACKOFFS = (0.5, 1.0, 2.0, 4.0, *[8.0] * 450)
"""Seconds between Kopf's attempts of one request: more than an hour, after which the process ends."""


def registry(
    observations: Observations,
    enqueue: Callable[[Key], None],
    start: Callable[[], Awaitable[None]],
    end: Callable[[], Awaitable[None]],
) -> kopf.OperatorRegistry:
    """Kopf's handlers. Those of events do not make Kopf add annotations or finalizers to objects.

    start, end: called before the first watch and after the last one.
    """
    handlers = kopf.OperatorRegistry()

    @kopf.on.startup(registry=handlers, id="start", errors=kopf.ErrorsMode.PERMANENT)
    async def startup(**_: Any) -> None:
        await start()

    @kopf.on.cleanup(registry=handlers, id="end", errors=kopf.ErrorsMode.PERMANENT)
    async def cleanup(**_: Any) -> None:
        await end()

    @kopf.on.login(registry=handlers, id="login")
    def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

    def watch(kind: Kind) -> None:
        @kopf.on.event(kind.group, kind.version, kind.plural, registry=handlers, id=f"observe-{kind.plural}")
        async def observe(event: Any, **_: Any) -> None:
            note(kind, event, observations, enqueue)

    for kind in (ROUTER, POD, *CHILDREN):
        watch(kind)
    return handlers


def note(kind: Kind, event: Any, observations: Observations, enqueue: Callable[[Key], None]) -> None:
    """Update the cache with an event, and enqueue the DPSRouter that its object belongs to."""
    # A copy, because Kopf passes a view. Items of an initial listing have no apiVersion and kind.
    body: Manifest = {"apiVersion": kind.api_version, "kind": kind.name, **event["object"]}
    update = {ROUTER: observations.update_router, POD: observations.update_pod}.get(
        kind, observations.update_child
    )
    key = update(body, deleted=event["type"] == "DELETED")
    if key in observations.routers or kind is ROUTER:
        enqueue(key)


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Kopf's settings: watch only objects of the operator, and reconnect watches every five minutes."""
    result = kopf.OperatorSettings()
    for kind in (POD, *CHILDREN):
        result.watching.label_selectors[kind.group, kind.version, kind.plural] = OWNED_SELECTOR
    result.watching.server_timeout = 300
    result.watching.client_timeout = 310
    result.watching.connect_timeout = settings.request_timeout
    result.networking.request_timeout = settings.request_timeout
    result.networking.error_backoffs = BACKOFFS
    result.posting.enabled = False
    # Kopf reads CRDs to notice kinds that are installed later. An operator of some namespaces may not read them: it
    # notices these kinds, but watches them only after its next start.
    result.scanning.disabled = bool(settings.namespaces)
    return result


FIRST_RETRY, LAST_RETRY = 1.0, 30.0
"""Seconds before a failed listing is repeated, doubled after each failure up to the maximum."""
DISCOVERY_SECONDS = 15.0
"""Seconds between checks for kinds that were not installed."""
FAILING = Gauge("dps_operator_listing_failing", "1 while listing the required kinds fails")

log = logging.getLogger(__name__)


class Resync:
    """Lists all objects, forgets those that no longer exist, and enqueues every DPSRouter.

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
        """The kinds of children that the API server served in the last listing."""

    async def _read(self, kind: Kind, keep: Callable[[Manifest], object], selector: str = "") -> bool:
        """Pass all objects of a kind to `keep`. Returns False if its CRD is not installed.

        An object is released before the next one is passed, so that memory does not grow with the number of objects.
        One that `keep` cannot read is left out, so that one object cannot stop the operator.
        """
        # List items have no apiVersion and kind.
        identity = {"apiVersion": kind.api_version, "kind": kind.name}
        try:
            for namespace in self._settings.namespaces or (None,):
                async for page in self._cluster.pages(kind, namespace, selector):
                    while page:
                        found: Manifest = identity | page.pop()
                        try:
                            keep(found)
                        except Exception:
                            place = [found.get("metadata", {}).get(part) for part in ("namespace", "name")]
                            log.exception("%s %s/%s cannot be read", kind.name, *place)
        except NotInstalledError:
            return False
        return True

    async def once(self) -> None:
        """One full listing, after which every DPSRouter is reconciled.

        Those that were deleted without an event are included, so that what was kept for them is removed. Raises
        ClusterError if a request fails, and then forgets nothing.
        """
        seen, keys = self._observations, set(self._observations.routers)
        with seen.listing():
            installed = [
                kind for kind in CHILDREN if await self._read(kind, seen.update_child, OWNED_SELECTOR)
            ]
            await self._read(POD, seen.update_pod, OWNED_SELECTOR)
            await self._read(ROUTER, seen.update_router)
        self.installed = tuple(installed)
        for key in keys | seen.routers.keys():
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

    async def once_listed(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task after the first complete listing."""
        await self.complete.wait()
        await task()

    async def run(self) -> None:
        """List periodically, with backoff after failures."""
        retry = FIRST_RETRY
        while True:
            self.alive = time.monotonic()
            try:
                await self.once()
                self.complete.set()
                FAILING.set(0)
                retry, pause = FIRST_RETRY, self._settings.resync_seconds
            except ClusterError as error:
                FAILING.set(1)
                log.warning("listing failed: %s; retrying in %.0f s", error, retry)
                pause, retry = retry, min(retry * 2, LAST_RETRY)
            await self._wait(pause)
