"""An operator with one DPSRouter on an in-memory API server."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from dps_engines.pools import POOLS, PoolName
from dps_operator.autoscale import Activities, Activity
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.metrics import Found, MetricsReader
from dps_operator.objects import CHILDREN, Manifest
from dps_operator.observe import Observations
from dps_operator.reconcile import Reconciler
from dps_operator.settings import Settings
from dps_testkit.operator.routers import SETTINGS
from tests.operator.fake_cluster import FakeCluster
from tests.operator.objects import finished_rollout

KEY = ("serving", "qwen")
NOW = "2026-01-01T00:00:00Z"


class FakeGateways(MetricsReader):
    """Each gateway reports `activity`, unless `others` has its own, or all fail with `problem`."""

    def __init__(self) -> None:
        self.activity: dict[PoolName, Activity] = {pool: Activity() for pool in POOLS}
        self.others: dict[str, Activities] = {}
        self.problem = ""
        self.asked: list[str] = []

    async def gateways(self, addresses: list[str], parse: Callable[[str], Found]) -> dict[str, Found]:
        self.asked = addresses
        if self.problem:
            raise GatewaysUnreachableError(self.problem)
        found: Any = {address: self.others.get(address, dict(self.activity)) for address in addresses}
        return cast(dict[str, Found], found)

    async def engines(
        self, addresses: Sequence[str], port: int, parse: Callable[[str], Found]
    ) -> dict[str, Found]:
        return {}

    def report(self, pool: PoolName, **changes: float) -> None:
        """Change the activity of a pool."""
        self.activity[pool] = replace(self.activity[pool], **changes)


class OperatorHarness:
    """An API server, an operator, and one DPSRouter."""

    def __init__(self, spec: dict[str, Any], now: Callable[[], str] = lambda: NOW) -> None:
        self._now = now
        self.cluster = FakeCluster()
        self.edit(spec)
        self.restart()

    def restart(self, settings: Settings = SETTINGS) -> None:
        """Replace the operator with a new process, whose cache is empty."""
        self.seen = Observations()
        self.reconciler = Reconciler(self.cluster, self.seen, settings, self._now)

    def edit(self, spec: dict[str, Any]) -> None:
        """Apply a spec as a user would."""
        known = self.cluster.objects.get(("DPSRouter", *KEY), {})
        generation = known.get("metadata", {}).get("generation", 0) + 1
        self.cluster.store(
            {
                "apiVersion": "dpsrouter.io/v1alpha1",
                "kind": "DPSRouter",
                "metadata": {"name": "qwen", "namespace": "serving", "generation": generation},
            }
        )
        self.cluster.objects["DPSRouter", *KEY]["spec"] = spec

    async def list_objects(self) -> None:
        """Update the cache from a listing."""
        kinds = {kind.name for kind in CHILDREN}
        with self.seen.listing():
            for one in copy.deepcopy(list(self.cluster.objects.values())):
                if one["kind"] == "DPSRouter":
                    self.seen.update_router(one)
                elif one["kind"] == "Pod":
                    self.seen.update_pod(one)
                elif one["kind"] in kinds:
                    self.seen.update_child(one)

    async def reconcile(self) -> None:
        """List and reconcile."""
        await self.list_objects()
        await self.reconciler.reconcile(KEY)

    def condition(self, kind: str) -> Manifest:
        """A condition of the DPSRouter."""
        conditions = self.cluster.objects["DPSRouter", *KEY]["status"]["conditions"]
        (found,) = [one for one in conditions if one["type"] == kind]
        result: Manifest = found
        return result

    def object(self, kind: str, name: str) -> Manifest:
        """A child."""
        return self.cluster.objects[kind, "serving", name]

    def status(self) -> Manifest:
        """The status of the DPSRouter."""
        result: Manifest = self.cluster.objects["DPSRouter", *KEY]["status"]
        return result

    def available(self, name: str, replicas: int = 1, kind: str = "Deployment") -> None:
        """Set the status of a Deployment or StatefulSet to that of a finished rollout."""
        live = self.object(kind, name)
        live["status"] = finished_rollout(live, replicas)

    def rolled_out(self) -> None:
        """Set the status of every Deployment and StatefulSet to that of a finished rollout."""
        for kind in ("Deployment", "StatefulSet"):
            for name in self.cluster.names(kind):
                self.available(name, self.object(kind, name)["spec"].get("replicas", 1), kind)
