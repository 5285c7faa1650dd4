"""Scheduling constraints of engine pods: the A100 profiles combined with the spec's own constraints."""

from typing import Any

from dps_operator.api.model import NodePool
from dps_operator.api.types import to_wire
from dps_operator.resources import Manifest

Expression = tuple[str, tuple[str, ...]]
PRODUCT = "nvidia.com/gpu.product"

# Each row is one convention for labelling nodes with a GPU; a node has to match any one row.
# Sources: NVIDIA GPU feature discovery; GKE accelerator labels; AWS p4 instances, Karpenter and EKS Auto Mode
# instance labels; Azure A100 sizes.
PROFILES: dict[str, tuple[tuple[Expression, ...], ...]] = {
    "A100-80GB": (
        (
            (
                PRODUCT,
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
                PRODUCT,
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

GPU_BYTES = {"A100-80GB": 80 * 2**30, "A100-40GB": 40 * 2**30}
"""Memory of one GPU of each profile."""

GPU_TOLERATIONS: tuple[Manifest, ...] = (
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"},
)
"""The taint of GKE and of most GPU node groups, and the one in the AKS documentation."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


SHARED_SUFFIX = "-SHARED"
"""GPU feature discovery appends this to the product of a GPU that the device plugin offers several times."""


def _profile_terms(profile: str, *, shared: bool) -> list[Manifest]:
    """The profile's rows as node selector terms.

    shared: require GPUs that are offered several times, where a label says so.
    """
    terms = []
    for row in PROFILES[profile]:
        expressions = []
        for key, values in row:
            suffix = SHARED_SUFFIX if shared and key == PRODUCT else ""
            expressions.append({"key": key, "operator": "In", "values": [value + suffix for value in values]})
        terms.append({"matchExpressions": expressions})
    return terms


def _conjunction(left: list[Manifest], right: list[Manifest]) -> list[Manifest]:
    """The conjunction of two lists of node selector terms. The terms of a list are alternatives."""
    if not left or not right:
        return left or right
    return [
        {
            part: [*first.get(part, []), *second.get(part, [])]
            for part in ("matchExpressions", "matchFields")
            if part in first or part in second
        }
        for first in left
        for second in right
    ]


def placement(pool: NodePool, neighbour: dict[str, str] | None = None) -> Manifest:
    """`affinity`, `nodeSelector` and `tolerations` of an engine's pod spec; empty fields are omitted.

    neighbour: labels of the pod with which the engine shares a GPU; None if it shares none.
    """
    affinity: dict[str, Any] = dict(pool.affinity)
    node_affinity = dict(affinity.get("nodeAffinity", {}))
    own_terms = node_affinity.get(_REQUIRED, {}).get("nodeSelectorTerms", [])
    terms = _conjunction(_profile_terms(pool.profile, shared=neighbour is not None), own_terms)
    if terms:
        affinity["nodeAffinity"] = node_affinity | {_REQUIRED: {"nodeSelectorTerms": terms}}
    if neighbour is not None:
        pods = dict(affinity.get("podAffinity", {}))
        near = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": neighbour}}
        pods[_PREFERRED] = [*pods.get(_PREFERRED, []), {"weight": 100, "podAffinityTerm": near}]
        affinity["podAffinity"] = pods
    tolerations = [] if pool.profile == "None" else list(GPU_TOLERATIONS)
    tolerations += [to_wire(toleration) for toleration in pool.tolerations]
    fields = {"affinity": affinity, "nodeSelector": dict(pool.node_selector), "tolerations": tolerations}
    return {field: value for field, value in fields.items() if value}
