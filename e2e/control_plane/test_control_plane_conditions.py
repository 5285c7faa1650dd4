"""The conditions and events of a DPSRouter that cannot be served as its spec demands."""

import json

import pytest

from dps_testkit.cluster.kube import Kube, Manifest
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


def test_unknown_field_of_a_pod_template_is_reported_and_other_objects_are_applied(kube: Kube) -> None:
    kube.apply(router(pools={"speculative": {"podTemplate": {"spec": {"nodeSelectr": {}}}}}))
    kube.until("qwen", SpecValid="InvalidSpec")
    message = kube.condition("qwen", "SpecValid")["message"]
    assert "Deployment qwen-speculative" in message
    assert "nodeSelectr" in message
    assert deployment(kube, "gateway")["metadata"]["name"] == "qwen-gateway"


TROUBLES: dict[str, tuple[Manifest, str, str, str]] = {
    "no matching GPU node": (
        {"nodePool": {"nodeSelector": {"team": "nobody"}}},
        "SpeculativePoolReady",
        "WaitingForGPU",
        "add a node that spec.nodePool selects and that has a free GPU",
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


def test_pods_that_are_not_ready_can_be_evicted(kube: Kube) -> None:
    kube.apply(router(pools={"greedy": {"replicas": 2, **fate("crash")}}))
    kube.until("qwen", GreedyPoolReady="CrashLooping")
    for name in pods(kube, "greedy"):
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        path = f"/api/v1/namespaces/{kube.namespace}/pods/{name}/eviction"
        kube.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))
