"""The conditions and events of a DPSRouter that cannot be served as its spec demands."""

import json
from collections import Counter

import pytest

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator
from dps_testkit.waiting import eventually
from e2e.cluster.routers import router
from e2e.control_plane.objects import deployment, fate, pods, ready

pytest_plugins = ["e2e.cluster.fixtures"]
pytestmark = pytest.mark.usefixtures("shared_operator")


def test_autoscaler_without_its_metric_is_reported(kube: Kube) -> None:
    ready(kube, pools={"greedy": {"autoscaling": {"minReplicas": 1, "maxReplicas": 5}}})
    kube.until("qwen", 60, Ready="True", AutoscalingActive="AutoscalerFailed")
    message = kube.condition("qwen", "AutoscalingActive")["message"]
    assert message.startswith("the autoscaler of the greedy pool does not work: ")
    assert "dps_demand" in message


def test_pod_template_rejected_by_the_api_server_is_reported(kube: Kube) -> None:
    kube.apply(router(gateway={"podTemplate": {"spec": {"restartPolicy": "Sometimes"}}}))
    kube.until("qwen", SpecValid="InvalidSpec")
    assert "Deployment qwen-gateway" in kube.condition("qwen", "SpecValid")["message"]


def test_unknown_field_of_a_pod_template_is_reported_and_other_objects_are_applied(kube: Kube) -> None:
    kube.apply(router(pools={"speculative": {"podTemplate": {"spec": {"nodeSelectr": {}}}}}))
    kube.until("qwen", SpecValid="InvalidSpec")
    message = kube.condition("qwen", "SpecValid")["message"]
    assert "Deployment qwen-speculative" in message
    assert "nodeSelectr" in message
    assert deployment(kube, "gateway")["metadata"]["name"] == "qwen-gateway"


def test_missing_resource_kind_is_named_in_the_condition(kube: Kube) -> None:
    kube.apply(router(telemetry={"serviceMonitor": {}}))
    kube.until("qwen", Monitored="CRDNotInstalled", SpecValid="True", Ready="True")
    assert kube.condition("qwen", "Monitored")["message"].startswith(
        "ServiceMonitor is not installed in this cluster"
    )


TROUBLES: dict[str, tuple[Manifest, str, str, str]] = {
    "no matching GPU node": (
        {"nodePool": {"nodeSelector": {"team": "nobody"}}},
        "SpeculativePoolReady",
        "WaitingForGPU",
        "add a node that spec.nodePool selects and that has a free GPU",
    ),
    "crash loop": (
        {"pools": {"speculative": fate("crash")}},
        "SpeculativePoolReady",
        "CrashLooping",
        "increase --mem-fraction-static",
    ),
    "image pull failure": (
        {"pools": {"speculative": fate("pull")}},
        "SpeculativePoolReady",
        "ImagePullFailed",
        "cannot pull lmsysorg",
    ),
    "model loading": (
        {"pools": {"speculative": fate("loading")}},
        "SpeculativePoolReady",
        "LoadingModel",
        "is loading its model",
    ),
    "gateway larger than every node": (
        {"gateway": {"resources": {"requests": {"cpu": "1M"}}}},
        "GatewayReady",
        "Unschedulable",
        "Insufficient cpu",
    ),
    "storage class that does not exist": (
        {"sessionStore": {"managed": {"storageClassName": "absent"}}},
        "SessionStoreReady",
        "WaitingForVolume",
        "check the storage class and its provisioner",
    ),
}


@pytest.mark.parametrize(("change", "condition", "reason", "words"), TROUBLES.values(), ids=TROUBLES.keys())
def test_condition_gives_the_reason_for_not_serving(
    kube: Kube, change: Manifest, condition: str, reason: str, words: str
) -> None:
    kube.apply(router(**change))
    wanted = {condition: reason, "Ready": reason}
    kube.until("qwen", 60, **wanted)
    assert words in kube.condition("qwen", condition)["message"]


def test_quota_that_allows_no_pods_is_reported(kube: Kube) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
    kube.apply({**quota, "spec": {"hard": {"pods": "0"}}}, router())
    kube.until("qwen", SpeculativePoolReady="PodsForbidden", Ready="PodsForbidden")
    assert "exceeded quota: none" in kube.condition("qwen", "SpeculativePoolReady")["message"]


def test_quota_that_allows_no_additional_pod_is_reported_as_the_cause_of_a_delayed_rollout(
    kube: Kube,
) -> None:
    ready(kube)
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}}
    kube.apply({**quota, "spec": {"hard": {"pods": str(len(kube.list("pod")))}}})
    change: Manifest = {"pools": {"greedy": {"args": ["--log-level=debug"]}}}
    kube.apply(router(**change))

    def named() -> None:
        progressing = kube.condition("qwen", "Progressing")
        assert progressing["reason"] == "RollingOut"
        assert "exceeded quota: full" in progressing["message"]

    eventually(named)
    assert kube.condition("qwen")["status"] == "True"
    kube.kubectl("delete", "resourcequota", "full")
    ready(kube, **change)


def test_pool_without_a_node_for_each_replica_serves_and_is_rolled_out(kube: Kube) -> None:
    """Two nodes can run engines of this DPSRouter, which must not share one."""
    apart = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"dpsrouter.io/component": "speculative"}},
    }
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    strategy = {"maxSurge": 0, "maxUnavailable": 1}
    speculative = {"replicas": 3, "strategy": strategy, "podTemplate": {"spec": {"affinity": affinity}}}
    kube.apply(router(pools={"speculative": speculative}))
    kube.until("qwen", SpeculativePoolReady="SomeReplicasReady", Ready="True")
    message = kube.condition("qwen", "SpeculativePoolReady")["message"]
    assert message.startswith("2 of 3 replicas are ready; ")
    assert "didn't match pod anti-affinity rules" in message
    kube.apply(
        router(pools={"speculative": speculative, "greedy": {"replicas": 2, "args": ["--log-level=debug"]}})
    )

    def rolled_out() -> None:
        greedy = deployment(kube, "greedy")
        (engine,) = greedy["spec"]["template"]["spec"]["containers"]
        assert engine["args"][-1] == "--log-level=debug"
        assert greedy["status"].get("updatedReplicas") == greedy["status"].get("readyReplicas") == 2

    eventually(rolled_out)


def test_rollout_that_exceeds_its_deadline_is_reported_although_requests_are_served(
    kube: Kube, shared_operator: Operator
) -> None:
    ready(kube)
    kube.apply(router(pools={"speculative": {**fate("crash"), "args": ["--log-level=debug"]}}))
    kube.until("qwen", Progressing="RollingOut", Ready="True")
    # The controller keeps this condition, which it would set after the deadline of half an hour.
    exceeded = {
        "type": "Progressing",
        "status": "False",
        "reason": "ProgressDeadlineExceeded",
        "message": "ReplicaSet has timed out progressing.",
    }

    def expired() -> None:
        conditions = deployment(kube, "speculative")["status"]["conditions"]
        others = [one for one in conditions if one["type"] != "Progressing"]
        status = {"status": {"conditions": [*others, exceeded]}}
        kube.patch("deployment", "qwen-speculative", status, "--subresource=status")
        assert kube.condition("qwen", "Progressing")["reason"] == "ProgressDeadlineExceeded"

    eventually(expired)
    message = kube.condition("qwen", "Ready")["message"]
    assert message.startswith(
        "requests are served by both pools; the rollout of the speculative pool has failed: "
    )
    failed = f'dps_operator_rollout_failed{{router="qwen",router_namespace="{kube.namespace}"}} 1.0'
    assert failed in shared_operator.get("/metrics")


def test_pods_that_are_not_ready_can_be_evicted(kube: Kube) -> None:
    kube.apply(router(pools={"greedy": {"replicas": 2, **fate("crash")}}))
    kube.until("qwen", GreedyPoolReady="CrashLooping")
    for name in pods(kube, "greedy"):
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        path = f"/api/v1/namespaces/{kube.namespace}/pods/{name}/eviction"
        kube.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))


def test_events_are_posted_once(kube: Kube) -> None:
    ready(kube)
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 2}}})
    kube.until("qwen", Ready="True", Progressing="Settled")
    posted = Counter(
        event["reason"]
        for event in kube.get("events")["items"]
        if event["involvedObject"]["kind"] == "DPSRouter"
    )
    assert posted["Accepted"] == 1
    assert posted["Serving"] == 1
