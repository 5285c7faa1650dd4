"""Leader election between operator replicas, through a Lease of the API server.

Only the replica that holds the Lease reconciles. A replica that cannot renew it stops before another may take it over.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

from prometheus_client import Gauge

from dps_operator.errors import AlreadyExistsError, ClusterError, LeadershipLostError, NotFoundError
from dps_operator.kube import Cluster
from dps_operator.objects import LEASE, Manifest

DURATION_SECONDS: Final = 30
"""A Lease that has not been renewed for this long may be taken over."""
RENEW_SECONDS: Final = 5.0
"""Interval between renewals."""
RENEW_DEADLINE_SECONDS: Final = 15.0
"""A leader that could not renew for this long stops. Its last writes end before the Lease may be taken over."""
RETRY_SECONDS: Final = 2.0
"""Pause after a failed attempt to acquire or renew the Lease."""

LEADER = Gauge("dps_operator_leader", "1 while this replica reconciles; 0 while it waits for the Lease")

log = logging.getLogger(__name__)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Leadership:
    """Whether this replica reconciles: while it holds the Lease, or always if there is no Lease."""

    def __init__(self, cluster: Cluster, lease: str, identity: str | None = None) -> None:
        """lease: NAMESPACE/NAME; empty for none. identity: of the process, which must be unique."""
        self._cluster = cluster
        self._namespace, _, self._name = lease.partition("/")
        self._identity = identity or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._seen = ("", 0.0)
        """Resource version of the Lease, and the monotonic time at which it was first seen."""
        self.leading = asyncio.Event()
        """Set once this replica reconciles."""

    async def run(self) -> None:
        """Lead, after acquiring the Lease if there is one.

        Raises LeadershipLostError when this replica must stop reconciling.
        """
        if not self._name:
            self.leading.set()
            return
        LEADER.set(0)
        await self._retried("acquiring", lambda: self.try_acquire(time.monotonic()))
        LEADER.set(1)
        log.info("%s holds the Lease %s/%s", self._identity, self._namespace, self._name)
        self.leading.set()
        while True:
            try:
                async with asyncio.timeout(RENEW_DEADLINE_SECONDS):
                    await asyncio.sleep(RENEW_SECONDS)
                    await self._retried("renewing", self.renew)
            except TimeoutError:
                raise LeadershipLostError("the Lease could not be renewed in time") from None

    async def _retried(self, purpose: str, attempt: Callable[[], Awaitable[bool]]) -> None:
        """Repeat a call until it succeeds."""
        while True:
            try:
                if await attempt():
                    return
            except ClusterError as error:
                log.warning("%s the Lease failed: %s", purpose, error)
            await asyncio.sleep(RETRY_SECONDS)

    async def try_acquire(self, monotonic: float) -> bool:
        """Take the Lease if it is free or has expired. Returns whether this replica holds it now.

        Only this process's clock counts, so that clocks of nodes may differ. monotonic: the time in seconds. Raises
        ClusterError.
        """
        try:
            live = await self._cluster.get(LEASE, self._namespace, self._name)
        except NotFoundError:
            try:
                await self._cluster.create(
                    {
                        "apiVersion": LEASE.api_version,
                        "kind": LEASE.name,
                        "metadata": {"namespace": self._namespace, "name": self._name},
                        "spec": self._held() | {"acquireTime": _now(), "leaseTransitions": 0},
                    }
                )
            except AlreadyExistsError:
                return False
            return True
        spec, version = live["spec"], live["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = version, monotonic
        holder = spec.get("holderIdentity")
        if holder and holder != self._identity and monotonic - self._seen[1] < DURATION_SECONDS:
            return False
        taken = {"acquireTime": _now(), "leaseTransitions": spec.get("leaseTransitions", 0) + 1}
        return await self._write(version, self._held() | taken)

    async def renew(self) -> bool:
        """Renew the Lease once. Returns False after a conflict. Raises LeadershipLostError and ClusterError."""
        live = await self._cluster.get(LEASE, self._namespace, self._name)
        holder = live["spec"].get("holderIdentity")
        if holder != self._identity:
            raise LeadershipLostError(f"the Lease is held by {holder or 'no replica'}")
        return await self._write(live["metadata"]["resourceVersion"], self._held())

    async def release(self) -> None:
        """Give up the Lease at shutdown, if this replica holds one, so that another takes over immediately."""
        if not self._name or not self.leading.is_set():
            return
        try:
            live = await self._cluster.get(LEASE, self._namespace, self._name)
            if live["spec"].get("holderIdentity") == self._identity:
                await self._write(live["metadata"]["resourceVersion"], {"holderIdentity": ""})
        except ClusterError as error:
            log.warning("releasing the Lease failed: %s", error)

    async def _write(self, version: str, spec: Manifest) -> bool:
        """Change the Lease unless it has changed since `version`. Returns whether it was written."""
        change = {"metadata": {"resourceVersion": version}, "spec": spec}
        try:
            await self._cluster.merge(LEASE, self._namespace, self._name, change)
        except ClusterError as error:
            if error.status == 409:
                return False
            raise
        return True

    def _held(self) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": _now(),
        }
