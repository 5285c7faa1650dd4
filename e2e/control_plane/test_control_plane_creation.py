"""A DPSRouter on a real API server: its creation, its permissions and its deletion.

kwok simulates the nodes and kubelets. The operator runs with the permissions of the chart's ServiceAccount.
"""

import pytest

from dps_engines.sglang.runtime import DEFAULT_VERSION
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.errors import RefusedError
from dps_testkit.waiting import eventually
from e2e.cluster.routers import router
from e2e.control_plane.objects import OWNED, children, deployment, pods, ready

pytest_plugins = ["e2e.cluster.fixtures"]
pytestmark = pytest.mark.usefixtures("shared_operator")

NODES = {
    # Engines run neither on the node with a 40 GB GPU nor on the node with an additional taint.
    "speculative": {"a100-0", "aks-0"},
    "greedy": {"a100-0", "aks-0"},
    "gateway": {"cpu-0"},
    "redis": {"cpu-0"},
}


def test_minimal_router_becomes_ready(kube: Kube) -> None:
    ready(kube)
    assert children(kube) == [
        "ConfigMap/qwen-gateway",
        "Deployment/qwen-gateway",
        "Deployment/qwen-greedy",
        "Deployment/qwen-speculative",
        "PersistentVolumeClaim/data-qwen-redis-0",
        "PodDisruptionBudget/qwen-gateway",
        "Role/qwen-gateway",
        "RoleBinding/qwen-gateway",
        "Service/qwen-gateway",
        "Service/qwen-greedy",
        "Service/qwen-metrics",
        "Service/qwen-redis",
        "Service/qwen-speculative",
        "ServiceAccount/qwen-gateway",
        "StatefulSet/qwen-redis",
    ]
    heading, row = kube.kubectl("get", "dps").splitlines()
    assert " ".join(heading.split()) == "NAME READY POLICY THRESHOLD SPECULATIVE GREEDY GATEWAY AGE"
    assert row.split()[:7] == ["qwen", "True", "DeltaPrefill", "128", "1", "1", "2"]
    engine = deployment(kube, "speculative")["spec"]["template"]["spec"]
    assert engine["containers"][0]["image"].endswith(f":v{DEFAULT_VERSION}")
    # The accounting of the default version is right.
    assert "--mem-fraction-static" not in engine["containers"][0]["args"]
    spread = [constraint["topologyKey"] for constraint in engine["topologySpreadConstraints"]]
    assert spread == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    for component, nodes in NODES.items():
        assert {pod["spec"]["nodeName"] for pod in pods(kube, component).values()} <= nodes, component


def test_routers_of_a_namespace_share_a_secret_that_is_deleted_with_the_last(kube: Kube) -> None:
    kube.apply(router("first"), router("second"))
    for name in ("first", "second"):
        kube.until(name, Ready="True")

    def secret() -> Manifest:
        return kube.get("secret", "dps-router-credentials", "--show-managed-fields")

    assert {entry["manager"] for entry in secret()["metadata"]["managedFields"]} == {"dps-operator"}, (
        "the time of a server-side apply is proportional to the number of field managers"
    )
    both = secret()["data"]
    assert {name.partition("-")[0] for name in both} == {"first", "second"}
    kube.kubectl("delete", "dps/first")

    def left() -> None:
        assert secret()["data"] == {name: value for name, value in both.items() if name.startswith("second-")}

    eventually(left)
    (owner,) = secret()["metadata"]["ownerReferences"]
    assert owner["name"] == "second"
    kube.kubectl("delete", "dps/second")
    eventually(lambda: _absent(kube, "secret"))


def _absent(kube: Kube, kind: str) -> None:
    assert not kube.list(kind)


def test_deleting_a_router_deletes_all_children(kube: Kube) -> None:
    ready(kube, model={"cache": {"size": "10Gi"}}, networkPolicy={})
    kube.kubectl("delete", "dpsrouter", "qwen", "--timeout", "30s")

    def gone() -> None:
        assert children(kube) == []

    eventually(gone)


def test_router_recreated_immediately_gets_new_children(kube: Kube) -> None:
    ready(kube)
    kube.kubectl("delete", "dpsrouter", "qwen", "--timeout", "30s")
    ready(kube)
    uid = kube.get("dpsrouter", "qwen")["metadata"]["uid"]
    owners = {
        owner["uid"]
        for item in kube.list("deployment,service,configmap,secret", OWNED)
        for owner in item["metadata"]["ownerReferences"]
    }
    assert owners == {uid}


def test_gateway_may_only_watch_endpoints_and_its_config_map(kube: Kube) -> None:
    ready(kube)
    account = f"system:serviceaccount:{kube.namespace}:qwen-gateway"

    def may(verb: str, resource: str) -> bool:
        try:
            return kube.kubectl("auth", "can-i", verb, resource, "--as", account).strip() == "yes"
        except RefusedError:
            return False

    assert may("watch", "endpointslices.discovery.k8s.io")
    assert may("watch", "configmaps/qwen-gateway")
    denied = (("get", "secrets"), ("list", "pods"), ("create", "pods"), ("watch", "configmaps"))
    assert not any(may(*access) for access in denied)


def test_gateway_and_redis_satisfy_the_restricted_pod_security_standard(kube: Kube) -> None:
    kube.kubectl("label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=baseline")
    ready(kube)
    kube.kubectl(
        "label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite"
    )
    before = {**pods(kube, "gateway"), **pods(kube, "redis")}
    # Graceful termination is irrelevant here: only the admission of the new pods is tested.
    kube.kubectl("delete", "pod", *before, "--force", "--grace-period=0", "--wait=false")

    def replaced() -> None:
        after = {**pods(kube, "gateway"), **pods(kube, "redis")}
        assert len(after) == len(before) == 3
        assert not {item["metadata"]["uid"] for item in before.values()} & {
            item["metadata"]["uid"] for item in after.values()
        }

    eventually(replaced)
