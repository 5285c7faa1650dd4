"""Pod template merging and node selection."""

from typing import Any

import pytest
import yaml

from dps_engines.pools import POOLS
from dps_operator.api.model import NodePool
from dps_operator.api.types import PodTemplate, Resources
from dps_operator.builders.engine import engine_deployment
from dps_operator.builders.node_pool import GPU_TOLERATIONS, PROFILES, placement
from dps_operator.builders.pods import container_resources, overlay, pod_template
from dps_operator.errors import SpecError
from dps_operator.resources import labels
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router, smallest
from dps_testkit.paths import ROOT

OVERLAYS: dict[str, tuple[Any, Any, Any]] = {
    "added field": ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    "replaced field": ({"a": 1}, {"a": 2}, {"a": 2}),
    "merged objects": ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
    "container merged by name": (
        {"containers": [{"name": "engine", "image": "x"}]},
        {"containers": [{"name": "engine", "tty": True}]},
        {"containers": [{"name": "engine", "image": "x", "tty": True}]},
    ),
    "appended sidecar": (
        {"containers": [{"name": "engine"}]},
        {"containers": [{"name": "sidecar"}]},
        {"containers": [{"name": "engine"}, {"name": "sidecar"}]},
    ),
    "environment merged by name": (
        {"containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}]},
        {"containers": [{"name": "engine", "env": [{"name": "A", "value": "2"}, {"name": "B"}]}]},
        {"containers": [{"name": "engine", "env": [{"name": "A", "value": "2"}, {"name": "B"}]}]},
    ),
    "mount merged by path": (
        {"volumeMounts": [{"mountPath": "/a", "name": "x"}]},
        {"volumeMounts": [{"mountPath": "/a", "readOnly": True}]},
        {"volumeMounts": [{"mountPath": "/a", "name": "x", "readOnly": True}]},
    ),
    "spread constraint merged by topology": (
        {
            "topologySpreadConstraints": [
                {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"},
                {"topologyKey": "host", "maxSkew": 1},
            ]
        },
        {"topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]},
        {
            "topologySpreadConstraints": [
                {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"},
                {"topologyKey": "host", "maxSkew": 1},
            ]
        },
    ),
    "value replaced by valueFrom": (
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
    ),
    "volume with another source": (
        {"volumes": [{"name": "models", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]},
        {"volumes": [{"name": "models", "hostPath": {"path": "/data"}}]},
        {
            "volumes": [
                {"name": "models", "hostPath": {"path": "/data"}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ]
        },
    ),
    "volume with more settings of the same source": (
        {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]},
        {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "32Gi"}}]},
        {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}}]},
    ),
    **{
        f"{probe} with another handler": (
            {probe: {"httpGet": {"path": "/health"}, "periodSeconds": 5}},
            {probe: {"exec": {"command": ["true"]}}},
            {probe: {"periodSeconds": 5, "exec": {"command": ["true"]}}},
        )
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    },
    "hook with another handler": (
        {"lifecycle": {"preStop": {"sleep": {"seconds": 15}}}},
        {"lifecycle": {"preStop": {"httpGet": {"path": "/drain", "port": 1}}}},
        {"lifecycle": {"preStop": {"httpGet": {"path": "/drain", "port": 1}}}},
    ),
    "label that is called like a member of a union": (
        {"labels": {"value": "1"}},
        {"labels": {"valueFrom": "2"}},
        {"labels": {"value": "1", "valueFrom": "2"}},
    ),
    "replaced list": ({"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
}


@pytest.mark.parametrize(("base", "over", "wanted"), OVERLAYS.values(), ids=OVERLAYS.keys())
def test_templates_are_merged(base: Any, over: Any, wanted: Any) -> None:
    assert overlay(base, over) == wanted


def test_selector_labels_cannot_be_overridden() -> None:
    over = PodTemplate.model_validate(
        {"metadata": {"labels": {"dpsrouter.io/router": "other", "team": "llm"}}}
    )
    made = pod_template(router(SMALLEST), "greedy", {}, over)
    assert made["metadata"]["labels"] == labels(router(SMALLEST), "greedy") | {"team": "llm"}


RESOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a request": (
        {"requests": {"cpu": 8}},
        {"requests": {"cpu": "8", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    ),
    "a request above the default limit": (
        {"requests": {"memory": "3Gi"}},
        {"requests": {"cpu": "1", "memory": "3Gi"}, "limits": {"memory": "3Gi"}},
    ),
    "a limit above the default request": (
        {"limits": {"cpu": "2", "memory": "4Gi"}},
        {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "4Gi"}},
    ),
    "a limit below the default request": (
        {"limits": {"cpu": "500m", "memory": "900M"}},
        {"requests": {"cpu": "500m", "memory": "900M"}, "limits": {"cpu": "500m", "memory": "900M"}},
    ),
}


@pytest.mark.parametrize(("wanted", "expected"), RESOURCES.values(), ids=RESOURCES.keys())
def test_unset_resources_keep_their_defaults_within_the_limits(
    wanted: dict[str, Any], expected: dict[str, Any]
) -> None:
    defaults = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    assert container_resources(defaults, Resources.model_validate(wanted)) == expected


def matches(node: dict[str, str], terms: list[dict[str, Any]]) -> bool:
    """Whether a node's labels satisfy node selector terms of `In` expressions."""
    return any(
        all(node.get(one["key"]) in one["values"] for one in term.get("matchExpressions", []))
        for term in terms
    )


def node_terms(pool: NodePool) -> list[dict[str, Any]]:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms: list[dict[str, Any]] = placement(pool)["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    return terms


NODES: dict[str, tuple[dict[str, str], str]] = {
    "GKE a2-ultragpu": ({"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}, "A100-80GB"),
    "GKE a2-highgpu": ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "A100-40GB"),
    "EKS node group p4de": ({"node.kubernetes.io/instance-type": "p4de.24xlarge"}, "A100-80GB"),
    "EKS node group p4d": ({"node.kubernetes.io/instance-type": "p4d.24xlarge"}, "A100-40GB"),
    "EKS Karpenter 80 GB": (
        {
            "karpenter.k8s.aws/instance-gpu-name": "a100",
            "karpenter.k8s.aws/instance-gpu-memory": "81920",
        },
        "A100-80GB",
    ),
    "EKS Auto Mode 40 GB": (
        {"eks.amazonaws.com/instance-gpu-name": "a100", "eks.amazonaws.com/instance-gpu-memory": "40960"},
        "A100-40GB",
    ),
    "AKS NC24ads": ({"node.kubernetes.io/instance-type": "Standard_NC24ads_A100_v4"}, "A100-80GB"),
    "AKS ND96asr": ({"node.kubernetes.io/instance-type": "Standard_ND96asr_v4"}, "A100-40GB"),
    "feature discovery SXM": ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, "A100-80GB"),
    "feature discovery PCIe": ({"nvidia.com/gpu.product": "NVIDIA-A100-PCIE-40GB"}, "A100-40GB"),
}
OTHER_NODES: dict[str, dict[str, str]] = {
    "an H100": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "a slice of an A100": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"},
    "a shared A100": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED"},
    "an A100 of unknown memory": {"karpenter.k8s.aws/instance-gpu-name": "a100"},
    "no GPU": {"kubernetes.io/os": "linux"},
}


@pytest.mark.parametrize(("node", "profile"), NODES.values(), ids=NODES.keys())
def test_node_matches_only_the_profile_of_its_gpu(node: dict[str, str], profile: Any) -> None:
    found = {
        name
        for name in ("A100-80GB", "A100-40GB")
        if matches(node, node_terms(NodePool.model_validate({"profile": name})))
    }
    assert found == {profile}


@pytest.mark.parametrize("node", OTHER_NODES.values(), ids=OTHER_NODES.keys())
def test_node_without_a_whole_a100_matches_no_profile(node: dict[str, str]) -> None:
    for profile in ("A100-80GB", "A100-40GB"):
        assert not matches(node, node_terms(NodePool.model_validate({"profile": profile})))


def test_engines_of_the_example_for_spot_nodes_end_within_the_time_that_gke_gives_them() -> None:
    """GKE ends the pods of a Spot node after 15 s, in which requests in flight need time after the preStop hook."""
    spec = yaml.safe_load((ROOT / "manifests/examples/gke.yaml").read_text())["spec"]
    assert spec["nodePool"]["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    for pool in POOLS:
        deployment = engine_deployment(router(spec), pool, SETTINGS)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_custom_affinity_is_combined_with_the_profiles() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    wanted = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [zone]}]
            }
        },
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
    }
    pool = NodePool.model_validate({"affinity": wanted})
    terms = node_terms(pool)
    assert len(terms) == len(PROFILES["A100-80GB"])
    assert all(zone in term["matchExpressions"] for term in terms)
    assert placement(pool)["affinity"]["podAntiAffinity"] == wanted["podAntiAffinity"]


def test_gpu_taints_and_custom_taints_are_tolerated() -> None:
    pool = NodePool.model_validate({"tolerations": [{"key": "spot", "operator": "Exists"}]})
    assert placement(pool)["tolerations"] == [*GPU_TOLERATIONS, {"key": "spot", "operator": "Exists"}]


def test_without_a_profile_only_custom_constraints_apply() -> None:
    assert placement(NodePool(profile="None")) == {}
    assert placement(NodePool(profile="None", node_selector={"gpu": "h100"})) == {
        "nodeSelector": {"gpu": "h100"}
    }


def gpu_limits(in_template: bool, limits: dict[str, Any]) -> dict[str, Any]:
    """A pool whose resources or pod template limit the engine."""
    resources = {"limits": limits}
    if not in_template:
        return {"resources": resources}
    return {"podTemplate": {"spec": {"containers": [{"name": "engine", "resources": resources}]}}}


@pytest.mark.parametrize("in_template", [False, True], ids=["resources", "pod template"])
@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"nvidia.com/gpu": 2}, "nvidia.com/gpu: 2"),
        ({"nvidia.com/mig-3g.40gb": 1}, "nvidia.com/gpu: 1 and nvidia.com/mig-3g.40gb: 1"),
    ],
    ids=["more GPUs", "GPU and instance"],
)
def test_other_gpus_than_those_of_the_tensor_parallelism_are_refused(
    in_template: bool, limits: dict[str, Any], found: str
) -> None:
    with pytest.raises(SpecError) as refused:
        engine_deployment(smallest(greedy=gpu_limits(in_template, limits)), "greedy", SETTINGS)
    assert str(refused.value) == (
        f"spec.pools.greedy: the engine's limits ({found}) differ from spec.engine.tensorParallel, which is 1; remove "
        "them from resources and podTemplate, or change tensorParallel"
    )


@pytest.mark.parametrize("in_template", [False, True], ids=["resources", "pod template"])
@pytest.mark.parametrize(
    "limits",
    [
        {"nvidia.com/gpu": 0},
        {"nvidia.com/gpu": 1, "memory": "90Gi", "nvidia.com/hostdev": 4},
        {"nvidia.com/gpu": "0", "nvidia.com/mig-3g.40gb": "1"},
    ],
    ids=["no GPU", "the same", "instance instead"],
)
def test_as_many_gpus_as_the_tensor_parallelism_or_none_are_accepted(
    in_template: bool, limits: dict[str, Any]
) -> None:
    engine_deployment(smallest(greedy=gpu_limits(in_template, limits)), "greedy", SETTINGS)
