"""The GPUs of engine pods, and the nodes: the A100 profiles combined with the spec's own constraints."""

from typing import Any

from dps_engines.pools import PoolName
from dps_operator.api import NodePool, to_wire
from dps_operator.errors import SpecError
from dps_operator.objects import Manifest

PRODUCT = "nvidia.com/gpu.product"
GKE_ACCELERATOR = "cloud.google.com/gke-accelerator"

PROFILES: dict[str, list[dict[str, list[str]]]] = {
    "A100-80GB": [
        {
            PRODUCT: [
                *("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe", "NVIDIA-A100-PCIE-80GB"),
                *("A100-SXM4-80GB", "A100-PCIE-80GB"),
            ]
        },
        {GKE_ACCELERATOR: ["nvidia-a100-80gb"]},
        {"karpenter.k8s.aws/instance-gpu-name": ["a100"], "karpenter.k8s.aws/instance-gpu-memory": ["81920"]},
        {"eks.amazonaws.com/instance-gpu-name": ["a100"], "eks.amazonaws.com/instance-gpu-memory": ["81920"]},
        {
            "node.kubernetes.io/instance-type": [
                *("p4de.24xlarge", "Standard_NC24ads_A100_v4", "Standard_NC48ads_A100_v4"),
                *("Standard_NC96ads_A100_v4", "Standard_ND96amsr_A100_v4"),
            ]
        },
    ],
    "A100-40GB": [
        {PRODUCT: ["NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB", "A100-SXM4-40GB", "A100-PCIE-40GB"]},
        {GKE_ACCELERATOR: ["nvidia-tesla-a100"]},
        {"karpenter.k8s.aws/instance-gpu-name": ["a100"], "karpenter.k8s.aws/instance-gpu-memory": ["40960"]},
        {"eks.amazonaws.com/instance-gpu-name": ["a100"], "eks.amazonaws.com/instance-gpu-memory": ["40960"]},
        {"node.kubernetes.io/instance-type": ["p4d.24xlarge", "Standard_ND96asr_v4"]},
    ],
    "None": [],
}
"""The labels of nodes with each GPU. Each row is one convention, and a node has to match any one row.

Sources: NVIDIA GPU feature discovery; GKE accelerator labels; instance labels of Karpenter and EKS Auto Mode; AWS p4
instances and Azure A100 sizes."""

GPU_BYTES = {"A100-80GB": 80 * 2**30, "A100-40GB": 40 * 2**30}
"""Memory of one GPU of each profile."""

MIG_EIGHTHS = {
    "A100-80GB": {"1g.10gb": 1, "1g.20gb": 2, "2g.20gb": 2, "3g.40gb": 4, "4g.40gb": 4, "7g.80gb": 8},
    "A100-40GB": {"1g.5gb": 1, "1g.10gb": 2, "2g.10gb": 2, "3g.20gb": 4, "4g.20gb": 4, "7g.40gb": 8},
}
"""Eighths of a GPU's memory that an instance of each MIG profile has, by the profile of the node pool."""

GPU_TOLERATIONS: tuple[Manifest, ...] = (
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"},
)
"""The taint of GKE and of most GPU node groups, and the one in the AKS documentation."""

GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
"""How the names of the resources begin that NVIDIA's device plugin offers for GPUs."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


SHARES = 2
"""How many engines share a GPU with placement SharedGPU."""


def gpu_resource(pool: NodePool, *, shared: bool) -> str:
    """The resource of which an engine requests one for each GPU. shared: whether two engines share a GPU."""
    name = "nvidia.com/gpu"
    if pool.mig is not None and pool.mig.strategy == "Mixed":
        name = f"nvidia.com/mig-{pool.mig.profile}"
    return f"{name}.shared" if shared and pool.sharing.renamed else name


def check_gpus(template: Manifest, pool: PoolName, gpus: int) -> None:
    """Raises SpecError if the spec limits the engine of a pod template to another number of GPUs, except 0."""
    containers = template["spec"]["containers"] or []
    engine: Manifest = next((one for one in containers if one.get("name") == "engine"), {})
    limits = {
        resource: str(amount)
        for resource, amount in ((engine.get("resources") or {}).get("limits") or {}).items()
        if resource.startswith(GPU_RESOURCES) and str(amount) != "0"
    }
    if limits and list(limits.values()) != [str(gpus)]:
        found = " and ".join(f"{resource}: {amount}" for resource, amount in limits.items())
        raise SpecError(
            f"spec.pools.{pool}: the engine's limits ({found}) differ from spec.engine.tensorParallel, which is "
            f"{gpus}; remove them from resources and podTemplate, or change tensorParallel"
        )


def gpu_bytes(pool: NodePool) -> int | None:
    """Memory of one GPU, or of one instance with MIG; None if it is unknown.

    Raises SpecError if the GPU has no instances of the MIG profile.
    """
    whole = GPU_BYTES.get(pool.profile)
    if whole is None or pool.mig is None:
        return whole
    eighths = MIG_EIGHTHS[pool.profile]
    if pool.mig.profile not in eighths:
        raise SpecError(
            f"spec.nodePool.mig.profile: GPUs of profile {pool.profile} have no instances of {pool.mig.profile}; "
            f"choose one of {', '.join(eighths)}"
        )
    return whole * eighths[pool.mig.profile] // 8


def _in(key: str, *values: str) -> Manifest:
    return {"key": key, "operator": "In", "values": list(values)}


def _feature_discovery(products: list[str], pool: NodePool, *, shared: bool) -> list[Manifest]:
    """The labels of NVIDIA GPU feature discovery.

    With MIG's strategy mixed, the product is that of the whole GPU. Sharing is part of the product's name, unless the
    resource has another name; releases before 0.15.0, which had no MPS, set no sharing strategy.
    """
    suffix = ""
    if pool.mig is None or pool.mig.strategy == "Single":
        suffix += f"-MIG-{pool.mig.profile}" if pool.mig else ""
        suffix += "-SHARED" if shared and not pool.sharing.renamed else ""
    expressions = [_in(PRODUCT, *(product + suffix for product in products))]
    if shared and pool.sharing.strategy == "MPS":
        expressions += [
            _in("nvidia.com/gpu.sharing-strategy", "mps"),
            _in("nvidia.com/gpu.replicas", str(SHARES)),
        ]
    elif shared:
        expressions.append({"key": "nvidia.com/gpu.sharing-strategy", "operator": "NotIn", "values": ["mps"]})
    return expressions


def _gke(accelerators: list[str], pool: NodePool, *, shared: bool) -> list[Manifest]:
    """The labels of GKE, whose device plugin has only MIG's strategy single."""
    expressions = [_in(GKE_ACCELERATOR, *accelerators)]
    if pool.mig is not None:
        expressions.append(_in("cloud.google.com/gke-gpu-partition-size", pool.mig.profile))
    if shared:
        strategy = "mps" if pool.sharing.strategy == "MPS" else "time-sharing"
        expressions.append(_in("cloud.google.com/gke-gpu-sharing-strategy", strategy))
    if shared and pool.sharing.strategy == "MPS":
        expressions.append(_in("cloud.google.com/gke-max-shared-clients-per-gpu", str(SHARES)))
    return expressions


def _profile_terms(pool: NodePool, *, shared: bool) -> list[Manifest]:
    """The rows of the pool's profile as node selector terms.

    shared: require GPUs that are offered several times, where a label says so. Rows whose labels do not tell instances
    of MIG from whole GPUs are left out, unless the resource's name distinguishes them.
    """
    terms = []
    for row in PROFILES[pool.profile]:
        if PRODUCT in row:
            expressions = _feature_discovery(row[PRODUCT], pool, shared=shared)
        elif GKE_ACCELERATOR in row:
            expressions = _gke(row[GKE_ACCELERATOR], pool, shared=shared)
        elif pool.mig is not None and pool.mig.strategy == "Single":
            continue
        else:
            expressions = [_in(key, *values) for key, values in row.items()]
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
    terms = _conjunction(_profile_terms(pool, shared=neighbour is not None), own_terms)
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
