"""Observes volumes that cannot be mounted. Only the kubelet's events contain the cause."""

import asyncio
import logging
import time
from typing import Final

from dps_operator.cluster import Cluster
from dps_operator.errors import ClusterError
from dps_operator.kinds import EVENT
from dps_operator.observe import Key, Observations
from dps_operator.resources import Manifest
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 10.0
LISTING_SHARE: Final = 0.05
"""The largest part of the time that listing events may take. For each listing, the API server reads all events of the
namespace."""
WARNINGS: Final = "type=Warning,involvedObject.kind=Pod"
"""Field selector of the events that are listed."""
REASONS: Final = ("FailedMount", "FailedAttachVolume")
SUMMARY: Final = "Unable to attach or mount volumes"
"""The beginning of a message that repeats earlier failures without their cause."""

log = logging.getLogger(__name__)


def pause_after(seconds: float) -> float:
    """Seconds until the next listing of events, after one that took `seconds`."""
    return max(POLL_SECONDS, seconds / LISTING_SHARE)


def _rank(event: Manifest) -> tuple[bool, str]:
    """The order of events: those without a cause first, then by time."""
    when = event.get("lastTimestamp") or event.get("eventTime") or ""
    return not event.get("message", "").startswith(SUMMARY), when


class MountWatch:
    """Reads the events of pods whose containers have not been created yet.

    Events are listed only in namespaces with such pods, and only while there are any.
    """

    def __init__(self, cluster: Cluster, observations: Observations) -> None:
        self._cluster = cluster
        self._observations = observations

    async def run(self, queue: WorkQueue) -> None:
        """Observe until cancelled. A DPSRouter is queued for reconciling when the result changes."""
        took = 0.0
        while True:
            await asyncio.sleep(pause_after(took))
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
        creating = self._observations.creating()
        found: dict[Key, dict[str, str]] = {}
        for namespace in sorted({key[0] for key in creating}):
            events = await self._newest(namespace)
            for key, names in creating.items():
                if key[0] == namespace and (
                    failed := {name: events[name] for name in names if name in events}
                ):
                    found[key] = failed
        before, self._observations.unmounted = self._observations.unmounted, found
        return [key for key in {**before, **found} if before.get(key) != found.get(key)]

    async def _newest(self, namespace: str) -> dict[str, str]:
        """The message of the most significant event of each pod."""
        newest: dict[str, Manifest] = {}
        async for page in self._cluster.pages(EVENT, namespace, fields=WARNINGS):
            for event in page:
                if event.get("reason") not in REASONS:
                    continue
                name = event["involvedObject"]["name"]
                if name not in newest or _rank(event) >= _rank(newest[name]):
                    newest[name] = event
        return {name: event.get("message", "") for name, event in newest.items()}
