"""One pass over one DPSRouter, against an API server in memory."""

import copy
from typing import Any

import pytest

from dps_operator.cluster import Cluster
from dps_operator.errors import ClusterError, NotInstalledError, RejectedError
from dps_operator.kinds import CHILDREN
from dps_operator.observe import Observations
from dps_operator.reconcile import HANDOVER, Reconciler
from dps_operator.resources import Manifest
from dps_testkit.operator.fake_cluster import FakeCluster
from dps_testkit.operator.objects import pod
from dps_testkit.operator.routers import EVERYTHING, SETTINGS, SMALLEST

KEY = ("serving", "qwen")
NOW = "2026-01-01T00:00:00Z"


class World:
    """An API server, an operator that watches it, and one DPSRouter."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.cluster = FakeCluster()
        self.edit(spec)
        self.restart()

    def restart(self) -> None:
        """An operator that knows nothing but what it lists."""
        self.seen = Observations()
        typed: Cluster = self.cluster
        self.reconciler = Reconciler(typed, self.seen, SETTINGS, lambda: NOW)

    def edit(self, spec: dict[str, Any]) -> None:
        """The spec as a user writes it."""
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

    async def look(self) -> None:
        """What a listing sees."""
        objects = copy.deepcopy(list(self.cluster.objects.values()))
        kinds = {kind.name for kind in CHILDREN}
        self.seen.replace(
            [one for one in objects if one["kind"] == "DPSRouter"],
            [one for one in objects if one["kind"] in kinds],
            [one for one in objects if one["kind"] == "Pod"],
        )

    async def settle(self) -> None:
        """Look, and make it true."""
        await self.look()
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


@pytest.fixture
async def world() -> World:
    made = World(SMALLEST)
    await made.settle()
    return made


async def test_everything_is_made_in_one_pass(world: World) -> None:
    assert world.cluster.names("Deployment") == {"qwen-speculative", "qwen-greedy", "qwen-gateway"}
    assert world.condition("Ready")["reason"] == "Starting"
    assert world.cluster.names("Event")


async def test_a_second_pass_writes_nothing(world: World) -> None:
    before = world.cluster.writes()
    await world.settle()
    assert world.cluster.writes() == before


async def test_an_operator_that_starts_anew_changes_no_object(world: World) -> None:
    before = {name: one["metadata"]["resourceVersion"] for name, one in world.cluster.objects.items()}
    world.restart()
    await world.settle()
    after = {name: one["metadata"]["resourceVersion"] for name, one in world.cluster.objects.items()}
    assert after == before


async def test_a_field_that_somebody_else_took_over_is_taken_back(world: World) -> None:
    live = world.object("ConfigMap", "qwen-gateway")
    wanted = live["data"]["config.yaml"]
    live["data"] = {"config.yaml": "routing: {}"}
    live["metadata"]["managedFields"] = [
        {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:data": {}}}
    ]
    live["metadata"]["resourceVersion"] = "1000"
    await world.settle()
    assert world.object("ConfigMap", "qwen-gateway")["data"]["config.yaml"] == wanted


async def test_a_deleted_child_returns(world: World) -> None:
    del world.cluster.objects["Service", "serving", "qwen-greedy"]
    await world.settle()
    assert "qwen-greedy" in world.cluster.names("Service")


async def test_what_is_no_longer_asked_for_is_deleted_and_what_is_not_ours_stays() -> None:
    world = World(EVERYTHING)
    await world.settle()
    stranger = copy.deepcopy(world.object("NetworkPolicy", "qwen-redis"))
    stranger["metadata"] |= {"name": "mine", "ownerReferences": []}
    world.cluster.objects["NetworkPolicy", "serving", "mine"] = stranger
    world.edit(SMALLEST)
    await world.settle()
    assert world.cluster.names("NetworkPolicy") == {"mine"}
    assert world.cluster.names("HorizontalPodAutoscaler") == set()
    assert world.cluster.names("Ingress") == set()


async def test_the_password_is_made_once(world: World) -> None:
    first = world.object("Secret", "qwen-redis")["stringData"]["password"]
    world.restart()
    await world.settle()
    assert world.object("Secret", "qwen-redis")["stringData"]["password"] == first
    assert len(first) >= 32


async def test_a_spec_that_cannot_be_leaves_what_runs(world: World) -> None:
    before = copy.deepcopy(world.object("Deployment", "qwen-greedy"))
    world.edit({**SMALLEST, "engine": {"args": ["--port", "1"]}})
    await world.settle()
    assert world.condition("SpecValid")["status"] == "False"
    assert world.condition("SpecValid")["observedGeneration"] == 2
    assert world.object("Deployment", "qwen-greedy") == before


async def test_a_spec_of_a_newer_operator_is_told_by_its_field(world: World) -> None:
    world.edit({**SMALLEST, "futureField": {}})
    await world.settle()
    assert world.condition("SpecValid")["message"].startswith("spec.futureField: ")


FAILURES: dict[str, tuple[ClusterError, str, str]] = {
    "the server is overloaded": (ClusterError("too many requests", 429, 2.0), "Progressing", "Retrying"),
    "the server is away": (ClusterError("cannot be reached"), "Progressing", "Retrying"),
}


@pytest.mark.parametrize(("error", "kind", "reason"), FAILURES.values(), ids=FAILURES.keys())
async def test_a_failure_is_told_and_the_pass_repeated(error: ClusterError, kind: str, reason: str) -> None:
    world = World(SMALLEST)
    world.cluster.fail["apply", "Service"] = error
    await world.look()
    with pytest.raises(ClusterError):
        await world.reconciler.reconcile(KEY)
    assert world.condition(kind)["reason"] == reason
    world.cluster.fail.clear()
    await world.settle()
    assert world.condition("Progressing")["reason"] == "RollingOut"


async def test_a_missing_right_stops_only_what_it_is_about() -> None:
    world = World(SMALLEST)
    world.cluster.fail["apply", "Service"] = ClusterError("services is forbidden", 403)
    await world.look()
    with pytest.raises(ClusterError):
        await world.reconciler.reconcile(KEY)
    assert world.condition("Progressing")["message"] == "services is forbidden"
    assert world.cluster.names("Deployment") == {"qwen-speculative", "qwen-greedy", "qwen-gateway"}


async def test_a_refused_child_is_told_and_the_others_are_made() -> None:
    world = World(SMALLEST)
    world.cluster.fail["apply", "StatefulSet"] = RejectedError("spec is invalid", 422)
    await world.settle()
    assert world.condition("SpecValid")["message"].startswith("StatefulSet qwen-redis: spec is invalid")
    assert "qwen-gateway" in world.cluster.names("Deployment")


async def test_a_kind_that_is_not_installed_is_told() -> None:
    world = World(EVERYTHING)
    world.cluster.fail["apply", "ServiceMonitor"] = NotInstalledError("page not found", 404)
    await world.settle()
    assert world.condition("SpecValid")["message"].startswith(
        "ServiceMonitor is not installed in this cluster"
    )


async def test_an_object_of_somebody_else_is_left_alone() -> None:
    world = World(SMALLEST)
    mine = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "qwen-greedy", "namespace": "serving"},
    }
    world.cluster.store(mine, "kubectl")
    await world.settle()
    assert "is not owned by this DPSRouter" in world.condition("SpecValid")["message"]
    assert "spec" not in world.object("Service", "qwen-greedy")


async def test_children_of_a_predecessor_are_waited_for() -> None:
    world = World(SMALLEST)
    await world.settle()
    world.cluster.objects["DPSRouter", *KEY]["metadata"]["uid"] = "another"
    await world.look()
    with pytest.raises(ClusterError, match="belongs to a deleted DPSRouter of the same name"):
        await world.reconciler.reconcile(KEY)


async def test_replicas_are_handed_over_before_an_autoscaler_owns_them(world: World) -> None:
    pools = {**SMALLEST["pools"], "greedy": {"autoscaling": {"maxReplicas": 4}}}
    world.edit({**SMALLEST, "pools": pools})
    await world.settle()
    managers = {
        entry["manager"]: "f:replicas" in entry["fieldsV1"]["f:spec"]
        for entry in world.object("Deployment", "qwen-greedy")["metadata"]["managedFields"]
    }
    assert managers == {"dps-operator": False, HANDOVER: True}


async def test_gateway_pods_are_touched_once_for_each_configuration(world: World) -> None:
    gateway = pod("qwen-gateway-1", "gateway", phase="Running")
    world.cluster.objects["Pod", "serving", "qwen-gateway-1"] = gateway
    await world.settle()
    assert world.cluster.calls["merge"] == 1
    await world.settle()
    assert world.cluster.calls["merge"] == 1
    world.edit({**SMALLEST, "routing": {"thresholdTokens": 1}})
    await world.settle()
    assert world.cluster.calls["merge"] == 2


async def test_a_router_on_its_way_out_is_left_alone(world: World) -> None:
    world.cluster.objects["DPSRouter", *KEY]["metadata"]["deletionTimestamp"] = NOW
    world.cluster.objects.pop(("Service", "serving", "qwen-greedy"))
    before = world.cluster.writes()
    await world.settle()
    assert world.cluster.writes() == before


async def test_a_router_that_is_gone_is_forgotten(world: World) -> None:
    del world.cluster.objects["DPSRouter", *KEY]
    await world.settle()
    assert world.seen.children(KEY) == {}
