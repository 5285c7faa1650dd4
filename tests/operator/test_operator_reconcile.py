"""Reconciling one DPSRouter against an in-memory API server."""

import copy
from typing import Any

import pytest

from dps_operator.errors import ClusterError, NotInstalledError, RejectedError, SchemaError
from dps_operator.reconcile import HANDOVER
from dps_testkit.operator.routers import EVERYTHING, SMALLEST
from tests.operator.harness import KEY, NOW, OperatorHarness, serving


async def test_first_reconcile_creates_all_children_and_later_ones_change_nothing(
    harness: OperatorHarness,
) -> None:
    assert harness.cluster.names("Deployment") == {"qwen-speculative", "qwen-greedy", "qwen-gateway"}
    assert harness.condition("Ready")["reason"] == "Starting"
    assert harness.cluster.names("Event")
    before = harness.cluster.writes()
    await harness.reconcile()
    assert harness.cluster.writes() == before
    versions = {name: one["metadata"]["resourceVersion"] for name, one in harness.cluster.objects.items()}
    harness.restart()
    await harness.reconcile()
    for name, one in harness.cluster.objects.items():
        assert one["metadata"]["resourceVersion"] == versions[name]


async def test_undesired_children_are_deleted_but_not_objects_of_other_owners() -> None:
    harness = OperatorHarness(EVERYTHING)
    await harness.reconcile()
    stranger = copy.deepcopy(harness.object("NetworkPolicy", "qwen-redis"))
    stranger["metadata"] |= {"name": "mine", "ownerReferences": []}
    harness.cluster.objects["NetworkPolicy", "serving", "mine"] = stranger
    harness.edit(SMALLEST)
    await harness.reconcile()
    assert harness.cluster.names("NetworkPolicy") == {"mine"}
    assert harness.cluster.names("HorizontalPodAutoscaler") == set()
    assert harness.cluster.names("Ingress") == set()


def children(harness: OperatorHarness) -> dict[Any, Any]:
    """Copies of all objects but the DPSRouter and Events."""
    objects = harness.cluster.objects.items()
    return {name: copy.deepcopy(one) for name, one in objects if name[0] not in ("DPSRouter", "Event")}


async def test_invalid_spec_neither_changes_nor_deletes_running_workloads() -> None:
    harness = await serving(SMALLEST)
    before = children(harness)
    external = {"urlSecretRef": {"name": "redis", "key": "url"}}
    harness.edit({**SMALLEST, "engine": {"args": ["--port", "1"]}, "sessionStore": external})
    await harness.reconcile()
    assert harness.condition("SpecValid")["reason"] == "InvalidSpec"
    assert harness.condition("SpecValid")["message"].endswith("; running workloads are not changed")
    assert harness.condition("SpecValid")["observedGeneration"] == 2
    assert children(harness) == before


def with_greedy(**greedy: Any) -> dict[str, Any]:
    """A spec with these settings of the greedy pool."""
    return {**SMALLEST, "pools": {**SMALLEST["pools"], "greedy": greedy}}


def in_engines(**spec: Any) -> dict[str, Any]:
    """A spec with this pod spec in the pod template of one pool."""
    return with_greedy(podTemplate={"spec": spec})


def with_affinity(**affinity: Any) -> dict[str, Any]:
    return {**SMALLEST, "nodePool": {"affinity": affinity}}


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({**SMALLEST, "futureField": {}}, "spec.futureField: "),
    "object instead of containers": (
        in_engines(containers={"name": "engine"}),
        "containers must be a list of objects",
    ),
    "object instead of a name": (
        in_engines(containers=[{"name": {}}]),
        "name must be a single value in the items of containers",
    ),
    "text instead of limits": (
        in_engines(containers=[{"name": "engine", "resources": {"limits": "x"}}]),
        "limits must be an object",
    ),
    "list instead of an affinity": (with_affinity(nodeAffinity=[1]), "nodeAffinity must be an object"),
    "null in an affinity": (with_affinity(nodeAffinity=None, podAffinity=None), ""),
    "null in lists of a pod": (in_engines(volumes=None, initContainers=None), ""),
    "null in a container": (
        in_engines(containers=[{"name": "engine", "env": None, "resources": None, "startupProbe": None}]),
        "",
    ),
}


@pytest.mark.parametrize(("spec", "problem"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_unknown_field_or_malformed_part_of_a_free_object_is_reported_and_null_is_valid(
    spec: dict[str, Any], problem: str
) -> None:
    harness = OperatorHarness(spec)
    await harness.reconcile()
    assert harness.condition("SpecValid")["reason"] == ("InvalidSpec" if problem else "Accepted")
    assert problem in harness.condition("SpecValid")["message"]


FAILURES: dict[str, tuple[ClusterError, str]] = {
    "server overloaded": (ClusterError("too many requests", 429, 2.0), "too many requests"),
    "server unreachable": (ClusterError("cannot be reached"), "cannot be reached"),
    "missing permission": (ClusterError("services is forbidden", 403), "services is forbidden"),
}


@pytest.mark.parametrize(("error", "message"), FAILURES.values(), ids=FAILURES.keys())
async def test_failure_of_a_kind_is_reported_and_retried_and_the_others_are_applied(
    error: ClusterError, message: str
) -> None:
    harness = OperatorHarness(SMALLEST)
    harness.cluster.fail["apply", "Service"] = error
    await harness.list_objects()
    with pytest.raises(ClusterError):
        await harness.reconciler.reconcile(KEY)
    progressing = harness.condition("Progressing")
    assert progressing["reason"] == "Retrying"
    assert message in progressing["message"]
    if not error.transient:
        assert harness.cluster.names("Deployment") == {"qwen-speculative", "qwen-greedy", "qwen-gateway"}
    harness.cluster.fail.clear()
    await harness.reconcile()
    assert harness.condition("Progressing")["reason"] == "RollingOut"


REFUSED: dict[str, tuple[dict[str, Any], str, ClusterError, str]] = {
    "child": (
        SMALLEST,
        "StatefulSet",
        RejectedError("spec is invalid", 422),
        "StatefulSet qwen-redis: spec is invalid",
    ),
    "kind without a CRD": (
        EVERYTHING,
        "HTTPRoute",
        NotInstalledError("page not found", 404),
        "HTTPRoute is not installed in this cluster: install its CRD, or remove the field",
    ),
}


@pytest.mark.parametrize(("spec", "kind", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_refused_child_is_reported_and_the_others_are_applied(
    spec: dict[str, Any], kind: str, error: ClusterError, message: str
) -> None:
    harness = OperatorHarness(spec)
    harness.cluster.fail["apply", kind] = error
    await harness.reconcile()
    assert harness.condition("SpecValid")["message"] == (
        f"{message}; the other objects of the DPSRouter are applied"
    )
    assert "qwen-gateway" in harness.cluster.names("Deployment")


async def test_unknown_field_is_reported_and_not_dropped_by_a_merge_patch(harness: OperatorHarness) -> None:
    harness.cluster.fail["apply", "Deployment"] = SchemaError(
        "failed to create typed patch object: .spec.nodeSelectr: field not declared in schema", 400
    )
    harness.edit(in_engines(nodeSelectr={}))
    await harness.reconcile()
    assert ".spec.nodeSelectr: field not declared in schema" in harness.condition("SpecValid")["message"]
    assert harness.cluster.calls["merge"] == 0


async def test_object_of_another_owner_is_not_adopted() -> None:
    harness = OperatorHarness(SMALLEST)
    mine = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "qwen-greedy", "namespace": "serving"},
    }
    harness.cluster.store(mine, "kubectl")
    await harness.reconcile()
    assert "is not owned by this DPSRouter" in harness.condition("SpecValid")["message"]
    assert "spec" not in harness.object("Service", "qwen-greedy")


async def test_children_of_a_deleted_router_of_the_same_name_block_the_reconcile() -> None:
    harness = OperatorHarness(SMALLEST)
    await harness.reconcile()
    harness.cluster.objects["DPSRouter", *KEY]["metadata"]["uid"] = "another"
    await harness.list_objects()
    with pytest.raises(ClusterError, match="belongs to a deleted DPSRouter of the same name"):
        await harness.reconciler.reconcile(KEY)


async def test_externally_scaled_pool_keeps_its_replicas(harness: OperatorHarness) -> None:
    harness.edit(with_greedy(scaling="External"))
    await harness.reconcile()
    live = harness.object("Deployment", "qwen-greedy")
    live["spec"]["replicas"] = 5
    live["metadata"]["managedFields"] = [
        entry for entry in live["metadata"]["managedFields"] if entry["manager"] != HANDOVER
    ]
    writes = harness.cluster.writes()
    await harness.reconcile()
    assert harness.object("Deployment", "qwen-greedy")["spec"]["replicas"] == 5
    assert harness.cluster.writes() == writes + 1  # the status


def replica_managers(harness: OperatorHarness) -> dict[str, bool]:
    """The field managers of the greedy Deployment, and whether each owns its replicas."""
    return {
        entry["manager"]: "f:replicas" in entry["fieldsV1"]["f:spec"]
        for entry in harness.object("Deployment", "qwen-greedy")["metadata"]["managedFields"]
    }


async def test_suspended_router_has_no_engines_and_keeps_gateway_and_store(harness: OperatorHarness) -> None:
    spec = with_greedy(replicas=3)
    harness.edit(spec)
    await harness.reconcile()
    harness.edit({**spec, "suspend": True})
    await harness.reconcile()
    assert harness.replicas() == {"speculative": 0, "greedy": 0}
    assert harness.object("Deployment", "qwen-gateway")["spec"]["replicas"] == 2
    assert harness.object("StatefulSet", "qwen-redis")["spec"]["replicas"] == 1
    assert harness.condition("Ready")["reason"] == "Suspended"
    assert harness.routing()["suspended"] is True
    harness.edit(spec)
    await harness.reconcile()
    assert harness.replicas() == {"speculative": 1, "greedy": 3}
    assert "suspended" not in harness.routing()


@pytest.mark.parametrize(
    ("pool", "replicas"),
    [({"autoscaling": {"minReplicas": 2, "maxReplicas": 4}}, 2), ({"scaling": "External"}, 1)],
    ids=["autoscaling", "external"],
)
async def test_resumed_pool_of_another_controller_starts_with_its_minimum(
    harness: OperatorHarness, pool: dict[str, Any], replicas: int
) -> None:
    scaled = with_greedy(**pool)
    harness.edit(scaled)
    await harness.reconcile()
    assert replica_managers(harness) == {"dps-operator": False, HANDOVER: True}
    harness.edit({**scaled, "suspend": True})
    await harness.reconcile()
    assert harness.replicas()["greedy"] == 0
    harness.edit(scaled)
    await harness.reconcile()
    assert harness.replicas()["greedy"] == replicas
    assert replica_managers(harness) == {"dps-operator": False, HANDOVER: True}


async def test_paused_router_is_not_changed_but_its_status_is_updated(harness: OperatorHarness) -> None:
    del harness.cluster.objects["Service", "serving", "qwen-greedy"]
    before = children(harness)
    changed = {**SMALLEST, "routing": {"thresholdTokens": 1}, "suspend": True, "paused": True}
    harness.edit(changed)
    await harness.reconcile()
    assert children(harness) == before
    assert harness.condition("Progressing")["reason"] == "Paused"
    assert harness.condition("SpeculativePoolReady")["reason"] == "Starting"
    assert harness.cluster.objects["DPSRouter", *KEY]["status"]["routing"]["thresholdTokens"] == 128
    harness.edit({**changed, "paused": False})
    await harness.reconcile()
    assert "qwen-greedy" in harness.cluster.names("Service")
    assert harness.cluster.objects["DPSRouter", *KEY]["status"]["routing"]["thresholdTokens"] == 1


async def test_invalid_spec_of_a_paused_router_is_reported(harness: OperatorHarness) -> None:
    harness.edit({**SMALLEST, "engine": {"args": ["--port", "1"]}, "paused": True})
    await harness.reconcile()
    assert harness.condition("SpecValid")["reason"] == "InvalidSpec"


async def test_waiting_pool_keeps_its_old_template_while_its_replicas_and_drift_are_reconciled(
    harness: OperatorHarness,
) -> None:
    rollout = {"replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}
    harness.object("Deployment", "qwen-speculative")["status"] = rollout
    harness.available("qwen-greedy")
    old = copy.deepcopy(harness.object("Deployment", "qwen-greedy"))
    harness.object("Deployment", "qwen-greedy")["spec"]["revisionHistoryLimit"] = 9
    harness.edit(with_greedy(replicas=3, args=["--log-level", "debug"]))
    await harness.reconcile()
    held = harness.object("Deployment", "qwen-greedy")
    assert held["spec"]["template"] == old["spec"]["template"]
    assert held["metadata"]["annotations"] == old["metadata"]["annotations"]
    assert (held["spec"]["replicas"], held["spec"]["revisionHistoryLimit"]) == (3, 3)
    assert "starts after that of the speculative pool" in harness.condition("Progressing")["message"]
    writes = harness.cluster.writes()
    await harness.reconcile()
    assert harness.cluster.writes() == writes
    harness.available("qwen-speculative")
    await harness.reconcile()
    (engine,) = harness.object("Deployment", "qwen-greedy")["spec"]["template"]["spec"]["containers"]
    assert engine["args"][-2:] == ["--log-level", "debug"]


async def test_terminating_router_is_not_reconciled(harness: OperatorHarness) -> None:
    harness.cluster.objects["DPSRouter", *KEY]["metadata"]["deletionTimestamp"] = NOW
    harness.cluster.objects.pop(("Service", "serving", "qwen-greedy"))
    before = harness.cluster.writes()
    await harness.reconcile()
    assert harness.cluster.writes() == before


async def test_router_whose_status_cannot_be_written_because_it_is_deleted_is_removed_from_the_cache(
    harness: OperatorHarness,
) -> None:
    harness.rolled_out()
    await harness.list_objects()
    del harness.cluster.objects["DPSRouter", *KEY]
    await harness.reconciler.reconcile(KEY)
    assert KEY not in harness.seen.routers
    assert harness.seen.children(KEY) == {}


def test_deletion_of_a_router_does_not_remove_one_that_was_created_again(harness: OperatorHarness) -> None:
    created = harness.cluster.objects["DPSRouter", *KEY]
    deleted = {**created, "metadata": {**created["metadata"], "uid": "another"}}
    harness.seen.update_router(deleted, deleted=True)
    assert KEY in harness.seen.routers


async def test_pods_that_a_quota_forbids_are_reported(harness: OperatorHarness) -> None:
    forbidden = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    harness.object("Deployment", "qwen-greedy")["status"] = {"conditions": [forbidden]}
    await harness.reconcile()
    assert harness.condition("GreedyPoolReady")["reason"] == "PodsForbidden"
