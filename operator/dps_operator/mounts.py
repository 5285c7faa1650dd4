"""Observes volumes that cannot be mounted. Only the kubelet's events contain the cause."""

import asyncio
import logging
import time
from typing import Final

from dps_operator.errors import ClusterError
from dps_operator.kube import Cluster
from dps_operator.objects import EVENT, Key, Manifest
from dps_operator.observe import Observations
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 10.0
"""Shortest interval between listings of events."""
LISTING_SHARE: Final = 0.05
"""The largest part of the time that listing events may take. For each listing, the API server reads all events of the
namespace."""
WARNINGS: Final = "type=Warning,involvedObject.kind=Pod"
"""Field selector of the events that are listed."""
REASONS: Final = ("FailedMount", "FailedAttachVolume")
PULLS: Final = "reason=Pulling,involvedObject.kind=Pod"
"""Field selector of the events that show that a pod's volumes are mounted: the kubelet pulls the images afterwards.

Old failures cannot be recognised by their age alone, because the kubelet limits the events of a pod that keeps failing
to one in five minutes."""
SUMMARY: Final = "Unable to attach or mount volumes"
"""The beginning of a message that repeats earlier failures without their cause."""

log = logging.getLogger(__name__)


def _time(event: Manifest) -> str:
    """When an event happened last (RFC 3339, UTC)."""
    return event.get("lastTimestamp") or event.get("eventTime") or ""


def _rank(event: Manifest) -> tuple[bool, str]:
    """The order of events: those without a cause first, then by time."""
    return not event.get("message", "").startswith(SUMMARY), _time(event)


class MountWatch:
    """Reads the events of pods whose volumes may not be mounted yet.

    Events are listed only in namespaces with such pods, and only while there are any.
    """

    def __init__(self, cluster: Cluster, observations: Observations) -> None:
        self._cluster = cluster
        self._observations = observations

    async def run(self, queue: WorkQueue) -> None:
        """Observe until cancelled. A DPSRouter is queued for reconciling when the result changes."""
        took = 0.0
        while True:
            await asyncio.sleep(max(POLL_SECONDS, took / LISTING_SHARE))
            began = time.monotonic()
            try:
                changed = await self.once()
            except ClusterError as error:
                log.warning("listing events failed: %s", error)
                continue
            finally:
                took = time.monotonic() - began
            for key in changed:
                queue.add(key)

    async def once(self) -> list[Key]:
        """Observe every pod once. Returns the DPSRouters for which the result has changed. Raises ClusterError."""
        waiting_pods = self._observations.awaiting_volumes()
        found: dict[Key, dict[str, str]] = {}
        for namespace in sorted({key[0] for key in waiting_pods}):
            keys = [key for key in waiting_pods if key[0] == namespace]
            waiting = {name for key in keys for name in waiting_pods[key]}
            failures = await self._failures(namespace, waiting)
            for key in keys:
                if failed := {name: failures[name] for name in waiting_pods[key] if name in failures}:
                    found[key] = failed
        before, self._observations.unmounted = self._observations.unmounted, found
        return [key for key in {**before, **found} if before.get(key) != found.get(key)]

    async def _failures(self, namespace: str, pods: set[str]) -> dict[str, str]:
        """Why the volumes of these pods cannot be mounted, for those whose volumes have not been mounted since."""
        failures = await self._newest(namespace, WARNINGS, REASONS, pods)
        if not failures:
            return {}
        pulls = await self._newest(namespace, PULLS, ("Pulling",), pods)
        return {
            name: failure.get("message", "")
            for name, failure in failures.items()
            if name not in pulls or _time(failure) > _time(pulls[name])
        }

    async def _newest(
        self, namespace: str, fields: str, reasons: tuple[str, ...], pods: set[str]
    ) -> dict[str, Manifest]:
        """The most significant event with one of these reasons about each of these pods. fields: a field selector."""
        newest: dict[str, Manifest] = {}
        async for page in self._cluster.pages(EVENT, namespace, fields=fields):
            for event in page:
                name = event["involvedObject"].get("name", "")
                if event.get("reason") not in reasons or name not in pods:
                    continue
                if name not in newest or _rank(event) >= _rank(newest[name]):
                    newest[name] = event
        return newest
