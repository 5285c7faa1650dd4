"""An operator with one DPSRouter on an in-memory API server."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import yaml

from dps_engines.pools import POOLS, PoolName
from dps_operator.autoscale import Activity, Autoscaler
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.metrics import Found, MetricsReader
from dps_operator.objects import CHILDREN, Manifest
from dps_operator.observe import Observations
from dps_operator.reconcile import Reconciler
from dps_operator.settings import Settings
from dps_operator.work_queue import WorkQueue
from dps_testkit.operator.routers import SETTINGS
from tests.operator.fake_cluster import FakeCluster
from tests.operator.objects import READY, finished_rollout, pod

KEY = ("serving", "qwen")
NOW = "2026-01-01T00:00:00Z"


class FakeGateways(MetricsReader):
    """Each gateway reports `activity`, or all fail with `problem`."""

    def __init__(self) -> None:
        self.activity: dict[PoolName, Activity] = {pool: Activity() for pool in POOLS}
        self.problem = ""
        self.asked: list[str] = []

    async def gateways(self, addresses: list[str], parse: Callable[[str], Found]) -> dict[str, Found]:
        self.asked = addresses
        if self.problem:
            raise GatewaysUnreachableError(self.problem)
        found: Any = {address: dict(self.activity) for address in addresses}
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

    def replicas(self) -> dict[PoolName, int]:
        """The replicas that the Deployments of the pools request."""
        return {pool: self.object("Deployment", f"qwen-{pool}")["spec"].get("replicas", 1) for pool in POOLS}

    def routing(self) -> Manifest:
        """The section `routing` of the gateways' configuration."""
        config = yaml.safe_load(self.object("ConfigMap", "qwen-gateway")["data"]["config.yaml"])
        result: Manifest = config["routing"]
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


async def serving(spec: dict[str, Any]) -> OperatorHarness:
    """A DPSRouter whose rollouts have finished."""
    harness = OperatorHarness(spec)
    await harness.reconcile()
    harness.rolled_out()
    await harness.reconcile()
    return harness


class ScalingHarness(OperatorHarness):
    """A DPSRouter with one gateway, which the operator scales, and whose pools have the replicas that they request."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.gateways, self.time = FakeGateways(), 0
        super().__init__(dict(spec), self.now)
        self.cluster.store(pod("gateway-1", "gateway", podIP="10.0.0.1", conditions=[READY]))

    def now(self) -> str:
        return f"2026-01-01T00:{self.time // 60:02}:{self.time % 60:02}Z"

    def restart(self, settings: Settings = SETTINGS) -> None:
        super().restart(settings)
        queue = WorkQueue(self.reconciler.reconcile)
        self.scaler = Autoscaler(self.seen, queue, self.gateways, self.now)

    async def settle(self) -> dict[PoolName, int]:
        """Reconcile, start and stop engines as requested, until nothing changes; returns the replicas."""
        for _ in range(4):
            await self.reconcile()
            self.rolled_out()
            for pool, count in self.replicas().items():
                for number in range(4):
                    if number < count:
                        self.cluster.store(pod(f"{pool}-{number}", pool))
                    else:
                        self.cluster.objects.pop(("Pod", KEY[0], f"{pool}-{number}"), None)
        return self.replicas()

    async def poll(self, seconds: int = 0) -> dict[PoolName, int]:
        """Read the activity once, `seconds` later, and reconcile."""
        self.time += seconds
        await self.scaler.once(self.time)
        return await self.settle()
