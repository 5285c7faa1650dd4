"""Which nodes an engine may run on: the A100 profiles, and what the spec adds to them."""

from typing import Any

from dps_operator.api.model import NodePool
from dps_operator.api.types import to_wire
from dps_operator.resources import Manifest

Expression = tuple[str, tuple[str, ...]]

# One GPU has several names: each row is one way of a cloud to label its nodes, and any row will do.
# Sources: NVIDIA GPU feature discovery; GKE accelerator labels; AWS p4 instances, Karpenter and EKS Auto Mode
# instance labels; Azure A100 sizes.
PROFILES: dict[str, tuple[tuple[Expression, ...], ...]] = {
    "A100-80GB": (
        (
            (
                "nvidia.com/gpu.product",
                (
                    "NVIDIA-A100-SXM4-80GB",
                    "NVIDIA-A100-80GB-PCIe",
                    "NVIDIA-A100-PCIE-80GB",
                    "A100-SXM4-80GB",
                    "A100-PCIE-80GB",
                ),
            ),
        ),
        (("cloud.google.com/gke-accelerator", ("nvidia-a100-80gb",)),),
        (
            ("karpenter.k8s.aws/instance-gpu-name", ("a100",)),
            ("karpenter.k8s.aws/instance-gpu-memory", ("81920",)),
        ),
        (
            ("eks.amazonaws.com/instance-gpu-name", ("a100",)),
            ("eks.amazonaws.com/instance-gpu-memory", ("81920",)),
        ),
        (
            (
                "node.kubernetes.io/instance-type",
                (
                    "p4de.24xlarge",
                    "Standard_NC24ads_A100_v4",
                    "Standard_NC48ads_A100_v4",
                    "Standard_NC96ads_A100_v4",
                    "Standard_ND96amsr_A100_v4",
                ),
            ),
        ),
    ),
    "A100-40GB": (
        (
            (
                "nvidia.com/gpu.product",
                ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB", "A100-SXM4-40GB", "A100-PCIE-40GB"),
            ),
        ),
        (("cloud.google.com/gke-accelerator", ("nvidia-tesla-a100",)),),
        (
            ("karpenter.k8s.aws/instance-gpu-name", ("a100",)),
            ("karpenter.k8s.aws/instance-gpu-memory", ("40960",)),
        ),
        (
            ("eks.amazonaws.com/instance-gpu-name", ("a100",)),
            ("eks.amazonaws.com/instance-gpu-memory", ("40960",)),
        ),
        (("node.kubernetes.io/instance-type", ("p4d.24xlarge", "Standard_ND96asr_v4")),),
    ),
    "None": (),
}

GPU_TOLERATIONS: tuple[Manifest, ...] = (
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"},
)
"""The taint of GKE and of GPU node groups in general, and the one that AKS' documentation uses."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _profile_terms(profile: str) -> list[Manifest]:
    return [
        {"matchExpressions": [{"key": key, "operator": "In", "values": list(values)} for key, values in row]}
        for row in PROFILES[profile]
    ]


def _both(left: list[Manifest], right: list[Manifest]) -> list[Manifest]:
    """Terms that hold where one of each side holds: Kubernetes joins terms by "or"."""
    if not left or not right:
        return left or right
    return [
        {
            part: [*one.get(part, []), *other.get(part, [])]
            for part in ("matchExpressions", "matchFields")
            if part in one or part in other
        }
        for one in left
        for other in right
    ]


def placement(pool: NodePool) -> Manifest:
    """`affinity`, `nodeSelector` and `tolerations` of an engine's pod spec; what is empty is left out."""
    affinity: dict[str, Any] = dict(pool.affinity)
    node_affinity = dict(affinity.get("nodeAffinity", {}))
    wanted = node_affinity.get(_REQUIRED, {}).get("nodeSelectorTerms", [])
    terms = _both(_profile_terms(pool.profile), wanted)
    if terms:
        affinity["nodeAffinity"] = node_affinity | {_REQUIRED: {"nodeSelectorTerms": terms}}
    tolerations = [] if pool.profile == "None" else list(GPU_TOLERATIONS)
    tolerations += [to_wire(toleration) for toleration in pool.tolerations]
    whole = {"affinity": affinity, "nodeSelector": dict(pool.node_selector), "tolerations": tolerations}
    return {field: value for field, value in whole.items() if value}
