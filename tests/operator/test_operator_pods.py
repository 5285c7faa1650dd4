"""Pod template merging and node selection."""

from typing import Any

import pytest

from dps_operator.api import NodePool, PodTemplate, Resources
from dps_operator.build.engine import engine_deployment
from dps_operator.build.nodes import PROFILES, placement
from dps_operator.build.pods import container_resources, overlay, pod_template
from dps_operator.errors import SpecError
from dps_operator.objects import labels
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router, smallest

OVERLAYS: dict[str, tuple[Any, Any, Any]] = {
    "objects": ({"a": {"b": 1, "c": 1}}, {"a": {"c": 2, "d": 3}}, {"a": {"b": 1, "c": 2, "d": 3}}),
    "container merged by name and appended sidecar": (
        {"containers": [{"name": "engine", "image": "x"}]},
        {"containers": [{"name": "engine", "tty": True}, {"name": "sidecar"}]},
        {"containers": [{"name": "engine", "image": "x", "tty": True}, {"name": "sidecar"}]},
    ),
    "spread constraint merged by topology": (
        {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}, {"topologyKey": "host"}]},
        {"topologySpreadConstraints": [{"topologyKey": "zone", "minDomains": 2}]},
        {
            "topologySpreadConstraints": [
                {"topologyKey": "zone", "maxSkew": 1, "minDomains": 2},
                {"topologyKey": "host"},
            ]
        },
    ),
    "value replaced by valueFrom": (
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
    ),
    "volume with another source": (
        {"volumes": [{"name": "models", "emptyDir": {}}, {"name": "shm"}]},
        {"volumes": [{"name": "models", "hostPath": {"path": "/data"}}]},
        {"volumes": [{"name": "models", "hostPath": {"path": "/data"}}, {"name": "shm"}]},
    ),
    **{
        f"{probe} with another handler": (
            {probe: {"httpGet": {"path": "/health"}, "periodSeconds": 5}},
            {probe: {"exec": {"command": ["true"]}}},
            {probe: {"periodSeconds": 5, "exec": {"command": ["true"]}}},
        )
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    },
    "label that is called like a member of a union": (
        {"labels": {"value": "1"}},
        {"labels": {"valueFrom": "2"}},
        {"labels": {"value": "1", "valueFrom": "2"}},
    ),
}


@pytest.mark.parametrize(("base", "over", "wanted"), OVERLAYS.values(), ids=OVERLAYS.keys())
def test_templates_are_merged(base: Any, over: Any, wanted: Any) -> None:
    assert overlay(base, over) == wanted


def test_selector_labels_cannot_be_overridden() -> None:
    over = PodTemplate.model_validate(
        {"metadata": {"labels": {"dpsrouter.io/router": "other", "team": "llm"}}}
    )
    made = pod_template(router(SMALLEST), "greedy", SETTINGS, {}, over)
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


NODES: dict[str, tuple[dict[str, str], str | None]] = {
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
    "an H100": ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, None),
    "a slice of an A100": ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, None),
    "a shared A100": ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED"}, None),
    "an A100 of unknown memory": ({"karpenter.k8s.aws/instance-gpu-name": "a100"}, None),
    "no GPU": ({"kubernetes.io/os": "linux"}, None),
}


@pytest.mark.parametrize(("node", "profile"), NODES.values(), ids=NODES.keys())
def test_node_matches_only_the_profile_of_its_whole_gpu(node: dict[str, str], profile: str | None) -> None:
    profiles = ("A100-80GB", "A100-40GB")
    found = [one for one in profiles if matches(node, node_terms(NodePool.model_validate({"profile": one})))]
    assert found == ([profile] if profile else [])


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
