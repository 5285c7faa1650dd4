"""An operator with one DPSRouter on an in-memory API server."""

import copy
from typing import Any

from dps_operator.cluster import Cluster
from dps_operator.gpu_budget.balancer import Allocations
from dps_operator.kinds import CHILDREN
from dps_operator.observe import Key, Observations
from dps_operator.prefix_cache.health import CacheHealth
from dps_operator.reconcile import ReadSize, Reconciler
from dps_operator.resources import Manifest
from dps_operator.scale_to_zero.scaler import IdlePools
from dps_operator.settings import Settings
from dps_testkit.operator.fake_cluster import FakeCluster
from dps_testkit.operator.objects import finished_rollout
from dps_testkit.operator.routers import SETTINGS

KEY = ("serving", "qwen")
NOW = "2026-01-01T00:00:00Z"


class OperatorHarness:
    """An API server, an operator, and one DPSRouter."""

    def __init__(self, spec: dict[str, Any], model_size: ReadSize | None = None) -> None:
        self.cluster = FakeCluster()
        self.edit(spec)
        self.restart(model_size=model_size)

    def restart(self, settings: Settings = SETTINGS, model_size: ReadSize | None = None) -> None:
        """Replace the operator with a new process, whose cache is empty."""
        self.seen = Observations()
        typed: Cluster = self.cluster
        self.allocations, self.idle_pools = Allocations(), IdlePools()
        self.cache_healths: dict[Key, CacheHealth] = {}
        self.reconciler = Reconciler(
            typed,
            self.seen,
            settings,
            lambda: NOW,
            self.allocations,
            self.cache_healths.get,
            self.idle_pools,
            model_size,
        )

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
        kinds, listed = {kind.name for kind in CHILDREN}, Observations()
        for one in copy.deepcopy(list(self.cluster.objects.values())):
            if one["kind"] == "DPSRouter":
                listed.update_router(one)
            elif one["kind"] == "Pod":
                listed.update_pod(one)
            elif one["kind"] in kinds:
                listed.update_child(one)
        self.seen.replace(listed)

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
