"""Reconciling one DPSRouter against an in-memory API server."""

import copy
from typing import Any

import pytest

from dps_operator.apply import HANDOVER
from dps_operator.errors import ClusterError, NotInstalledError, RejectedError
from dps_testkit.operator.routers import EVERYTHING, SMALLEST
from dps_testkit.operator.world import KEY, NOW, World


@pytest.fixture
async def world() -> World:
    made = World(SMALLEST)
    await made.reconcile()
    return made


async def test_first_reconcile_creates_all_children(world: World) -> None:
    assert world.cluster.names("Deployment") == {"qwen-speculative", "qwen-greedy", "qwen-gateway"}
    assert world.condition("Ready")["reason"] == "Starting"
    assert world.cluster.names("Event")


async def test_second_reconcile_writes_nothing(world: World) -> None:
    before = world.cluster.writes()
    await world.reconcile()
    assert world.cluster.writes() == before


async def test_operator_restart_changes_no_object(world: World) -> None:
    before = {name: one["metadata"]["resourceVersion"] for name, one in world.cluster.objects.items()}
    world.restart()
    await world.reconcile()
    after = {name: one["metadata"]["resourceVersion"] for name, one in world.cluster.objects.items()}
    assert after == before


async def test_field_of_another_manager_is_reverted(world: World) -> None:
    live = world.object("ConfigMap", "qwen-gateway")
    wanted = live["data"]["config.yaml"]
    live["data"] = {"config.yaml": "routing: {}"}
    live["metadata"]["managedFields"] = [
        {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:data": {}}}
    ]
    live["metadata"]["resourceVersion"] = "1000"
    await world.reconcile()
    assert world.object("ConfigMap", "qwen-gateway")["data"]["config.yaml"] == wanted


async def test_deleted_child_is_recreated(world: World) -> None:
    del world.cluster.objects["Service", "serving", "qwen-greedy"]
    await world.reconcile()
    assert "qwen-greedy" in world.cluster.names("Service")


async def test_undesired_children_are_deleted_but_not_objects_of_other_owners() -> None:
    world = World(EVERYTHING)
    await world.reconcile()
    stranger = copy.deepcopy(world.object("NetworkPolicy", "qwen-redis"))
    stranger["metadata"] |= {"name": "mine", "ownerReferences": []}
    world.cluster.objects["NetworkPolicy", "serving", "mine"] = stranger
    world.edit(SMALLEST)
    await world.reconcile()
    assert world.cluster.names("NetworkPolicy") == {"mine"}
    assert world.cluster.names("HorizontalPodAutoscaler") == set()
    assert world.cluster.names("Ingress") == set()


async def test_invalid_spec_does_not_change_running_workloads(world: World) -> None:
    before = copy.deepcopy(world.object("Deployment", "qwen-greedy"))
    world.edit({**SMALLEST, "engine": {"args": ["--port", "1"]}})
    await world.reconcile()
    assert world.condition("SpecValid")["status"] == "False"
    assert world.condition("SpecValid")["observedGeneration"] == 2
    assert world.object("Deployment", "qwen-greedy") == before


async def test_unknown_field_is_reported(world: World) -> None:
    world.edit({**SMALLEST, "futureField": {}})
    await world.reconcile()
    assert world.condition("SpecValid")["message"].startswith("spec.futureField: ")


FAILURES: dict[str, tuple[ClusterError, str, str]] = {
    "server overloaded": (ClusterError("too many requests", 429, 2.0), "Progressing", "Retrying"),
    "server unreachable": (ClusterError("cannot be reached"), "Progressing", "Retrying"),
}


@pytest.mark.parametrize(("error", "kind", "reason"), FAILURES.values(), ids=FAILURES.keys())
async def test_transient_failure_is_reported_and_retried(error: ClusterError, kind: str, reason: str) -> None:
    world = World(SMALLEST)
    world.cluster.fail["apply", "Service"] = error
    await world.list_objects()
    with pytest.raises(ClusterError):
        await world.reconciler.reconcile(KEY)
    assert world.condition(kind)["reason"] == reason
    world.cluster.fail.clear()
    await world.reconcile()
    assert world.condition("Progressing")["reason"] == "RollingOut"


async def test_missing_permission_affects_only_its_kind() -> None:
    world = World(SMALLEST)
    world.cluster.fail["apply", "Service"] = ClusterError("services is forbidden", 403)
    await world.list_objects()
    with pytest.raises(ClusterError):
        await world.reconciler.reconcile(KEY)
    assert world.condition("Progressing")["message"] == "services is forbidden"
    assert world.cluster.names("Deployment") == {"qwen-speculative", "qwen-greedy", "qwen-gateway"}


async def test_rejected_child_is_reported_and_the_others_are_applied() -> None:
    world = World(SMALLEST)
    world.cluster.fail["apply", "StatefulSet"] = RejectedError("spec is invalid", 422)
    await world.reconcile()
    assert world.condition("SpecValid")["message"].startswith("StatefulSet qwen-redis: spec is invalid")
    assert "qwen-gateway" in world.cluster.names("Deployment")


async def test_missing_crd_is_reported() -> None:
    world = World(EVERYTHING)
    world.cluster.fail["apply", "ServiceMonitor"] = NotInstalledError("page not found", 404)
    await world.reconcile()
    assert world.condition("SpecValid")["reason"] == "Accepted"
    assert world.condition("Monitored")["message"].startswith(
        "ServiceMonitor is not installed in this cluster"
    )


async def test_object_of_another_owner_is_not_adopted() -> None:
    world = World(SMALLEST)
    mine = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "qwen-greedy", "namespace": "serving"},
    }
    world.cluster.store(mine, "kubectl")
    await world.reconcile()
    assert "is not owned by this DPSRouter" in world.condition("SpecValid")["message"]
    assert "spec" not in world.object("Service", "qwen-greedy")


async def test_children_of_a_deleted_router_of_the_same_name_block_the_reconcile() -> None:
    world = World(SMALLEST)
    await world.reconcile()
    world.cluster.objects["DPSRouter", *KEY]["metadata"]["uid"] = "another"
    await world.list_objects()
    with pytest.raises(ClusterError, match="belongs to a deleted DPSRouter of the same name"):
        await world.reconciler.reconcile(KEY)


async def test_replicas_are_transferred_to_a_second_manager_before_autoscaling(world: World) -> None:
    pools = {**SMALLEST["pools"], "greedy": {"autoscaling": {"maxReplicas": 4}}}
    world.edit({**SMALLEST, "pools": pools})
    await world.reconcile()
    managers = {
        entry["manager"]: "f:replicas" in entry["fieldsV1"]["f:spec"]
        for entry in world.object("Deployment", "qwen-greedy")["metadata"]["managedFields"]
    }
    assert managers == {"dps-operator": False, HANDOVER: True}


async def test_externally_scaled_pool_keeps_its_replicas(world: World) -> None:
    pools = {**SMALLEST["pools"], "greedy": {"scaling": "External"}}
    world.edit({**SMALLEST, "pools": pools})
    await world.reconcile()
    live = world.object("Deployment", "qwen-greedy")
    live["spec"]["replicas"] = 5
    live["metadata"]["managedFields"] = [
        entry for entry in live["metadata"]["managedFields"] if entry["manager"] != HANDOVER
    ]
    writes = world.cluster.writes()
    await world.reconcile()
    assert world.object("Deployment", "qwen-greedy")["spec"]["replicas"] == 5
    assert world.cluster.writes() == writes + 1  # the status


def engine_replicas(world: World) -> dict[str, int]:
    return {
        pool: world.object("Deployment", f"qwen-{pool}")["spec"]["replicas"]
        for pool in ("speculative", "greedy")
    }


async def test_suspended_router_has_no_engines_and_keeps_gateway_and_store(world: World) -> None:
    pools = {**SMALLEST["pools"], "greedy": {"replicas": 3}}
    world.edit({**SMALLEST, "pools": pools})
    await world.reconcile()
    world.edit({**SMALLEST, "pools": pools, "suspend": True})
    await world.reconcile()
    assert engine_replicas(world) == {"speculative": 0, "greedy": 0}
    assert world.object("Deployment", "qwen-gateway")["spec"]["replicas"] == 2
    assert world.object("StatefulSet", "qwen-redis")["spec"]["replicas"] == 1
    assert world.condition("Ready")["reason"] == "Suspended"
    world.edit({**SMALLEST, "pools": pools})
    await world.reconcile()
    assert engine_replicas(world) == {"speculative": 1, "greedy": 3}


@pytest.mark.parametrize(
    ("pool", "replicas"),
    [({"autoscaling": {"minReplicas": 2, "maxReplicas": 4}}, 2), ({"scaling": "External"}, 1)],
    ids=["autoscaling", "external"],
)
async def test_resumed_pool_of_another_controller_starts_with_its_minimum(
    world: World, pool: dict[str, Any], replicas: int
) -> None:
    scaled = {**SMALLEST, "pools": {**SMALLEST["pools"], "greedy": pool}}
    world.edit(scaled)
    await world.reconcile()
    world.edit({**scaled, "suspend": True})
    await world.reconcile()
    assert engine_replicas(world)["greedy"] == 0
    world.edit(scaled)
    await world.reconcile()
    assert engine_replicas(world)["greedy"] == replicas
    managers = {
        entry["manager"]: "f:replicas" in entry["fieldsV1"]["f:spec"]
        for entry in world.object("Deployment", "qwen-greedy")["metadata"]["managedFields"]
    }
    assert managers == {"dps-operator": False, HANDOVER: True}


async def test_paused_router_is_not_changed_but_its_status_is_updated(world: World) -> None:
    del world.cluster.objects["Service", "serving", "qwen-greedy"]
    before = copy.deepcopy(world.cluster.objects)
    changed = {**SMALLEST, "routing": {"thresholdTokens": 1}, "suspend": True, "paused": True}
    world.edit(changed)
    await world.reconcile()
    after = {
        name: one for name, one in world.cluster.objects.items() if name[0] not in ("DPSRouter", "Event")
    }
    assert after == {name: one for name, one in before.items() if name[0] not in ("DPSRouter", "Event")}
    assert world.condition("Progressing")["reason"] == "Paused"
    assert world.condition("SpeculativePoolReady")["reason"] == "Starting"
    assert world.cluster.objects["DPSRouter", *KEY]["status"]["routing"]["thresholdTokens"] == 128
    world.edit({**changed, "paused": False})
    await world.reconcile()
    assert "qwen-greedy" in world.cluster.names("Service")
    assert world.cluster.objects["DPSRouter", *KEY]["status"]["routing"]["thresholdTokens"] == 1


async def test_invalid_spec_of_a_paused_router_is_reported(world: World) -> None:
    world.edit({**SMALLEST, "engine": {"args": ["--port", "1"]}, "paused": True})
    await world.reconcile()
    assert world.condition("SpecValid")["reason"] == "InvalidSpec"


def rolling_out(world: World, name: str) -> None:
    """Set the status of a Deployment to that of a rollout whose new pod is not ready."""
    live = world.object("Deployment", name)
    live["status"] = {"replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}


async def test_waiting_pool_keeps_its_old_template_while_its_replicas_and_drift_are_reconciled(
    world: World,
) -> None:
    rolling_out(world, "qwen-speculative")
    world.available("qwen-greedy")
    old = copy.deepcopy(world.object("Deployment", "qwen-greedy"))
    world.object("Deployment", "qwen-greedy")["spec"]["revisionHistoryLimit"] = 9
    pools = {**SMALLEST["pools"], "greedy": {"replicas": 3, "args": ["--log-level", "debug"]}}
    world.edit({**SMALLEST, "pools": pools})
    await world.reconcile()
    held = world.object("Deployment", "qwen-greedy")
    assert held["spec"]["template"] == old["spec"]["template"]
    assert held["metadata"]["annotations"] == old["metadata"]["annotations"]
    assert (held["spec"]["replicas"], held["spec"]["revisionHistoryLimit"]) == (3, 3)
    assert "starts after that of the speculative pool" in world.condition("Progressing")["message"]
    writes = world.cluster.writes()
    await world.reconcile()
    assert world.cluster.writes() == writes
    world.available("qwen-speculative")
    await world.reconcile()
    args = world.object("Deployment", "qwen-greedy")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-2:] == ["--log-level", "debug"]


async def test_unready_replica_does_not_delay_the_rollout_of_the_other_pool(world: World) -> None:
    world.object("Deployment", "qwen-speculative")["status"] = {
        "replicas": 3,
        "updatedReplicas": 3,
        "availableReplicas": 2,
    }
    world.available("qwen-greedy")
    pools = {**SMALLEST["pools"], "greedy": {"args": ["--log-level", "debug"]}}
    world.edit({**SMALLEST, "pools": pools})
    await world.reconcile()
    args = world.object("Deployment", "qwen-greedy")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-2:] == ["--log-level", "debug"]


async def test_terminating_router_is_not_reconciled(world: World) -> None:
    world.cluster.objects["DPSRouter", *KEY]["metadata"]["deletionTimestamp"] = NOW
    world.cluster.objects.pop(("Service", "serving", "qwen-greedy"))
    before = world.cluster.writes()
    await world.reconcile()
    assert world.cluster.writes() == before


async def test_deleted_router_is_removed_from_the_cache(world: World) -> None:
    del world.cluster.objects["DPSRouter", *KEY]
    await world.reconcile()
    assert world.seen.children(KEY) == {}


async def test_children_of_a_deleted_router_are_not_regarded_as_applied(world: World) -> None:
    deleted = world.cluster.objects.pop(("DPSRouter", *KEY))
    await world.reconcile()
    world.cluster.objects["DPSRouter", *KEY] = deleted
    before = world.cluster.writes()
    await world.reconcile()
    assert world.cluster.writes() - before >= len(world.seen.children(KEY))
