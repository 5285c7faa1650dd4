"""Nodes that offer one A100 80GB to two pods, and what a DPSRouter has to set to use them.

Labels and resources are those that NVIDIA's device plugin and GPU feature discovery 0.17 set, and those of GKE.
"""

from dataclasses import dataclass
from typing import Any, Literal

PRODUCT = "NVIDIA-A100-SXM4-80GB"


@dataclass(frozen=True)
class Offer:
    """A node that offers `resource` twice. spec: the part of a DPSRouter's spec that selects it."""

    platform: Literal["feature-discovery", "gke"]
    labels: dict[str, str]
    resource: str
    spec: dict[str, Any]


def _discovered(
    product: str,
    spec: dict[str, Any],
    *,
    replicas: int = 1,
    sharing: str = "none",
    resource: str = "nvidia.com/gpu",
    mig: str = "none",
) -> Offer:
    labels = {
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.replicas": str(replicas),
        "nvidia.com/gpu.sharing-strategy": sharing,
        "nvidia.com/mig.strategy": mig,
    }
    return Offer("feature-discovery", labels, resource, spec)


def _gke(spec: dict[str, Any], **labels: str) -> Offer:
    more = {f"cloud.google.com/gke-{label.replace('_', '-')}": value for label, value in labels.items()}
    accelerator = {"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}
    return Offer("gke", accelerator | more, "nvidia.com/gpu", spec)


def _shared(**node_pool: Any) -> dict[str, Any]:
    return {"placement": "SharedGPU", "nodePool": node_pool}


def _mig(profile: str, strategy: str = "Single") -> dict[str, str]:
    return {"profile": profile, "strategy": strategy}


_TIME_SLICING: dict[str, Any] = {"replicas": 2, "sharing": "time-slicing"}
_MPS = {"strategy": "MPS"}
_HALF = f"{PRODUCT}-MIG-3g.40gb"

OFFERS: dict[str, Offer] = {
    "whole": _discovered(PRODUCT, {}),
    "time-slicing": _discovered(f"{PRODUCT}-SHARED", _shared(), **_TIME_SLICING),
    "time-slicing-renamed": _discovered(
        PRODUCT, _shared(sharing={"renamed": True}), resource="nvidia.com/gpu.shared", **_TIME_SLICING
    ),
    "mps": _discovered(f"{PRODUCT}-SHARED", _shared(sharing=_MPS), replicas=2, sharing="mps"),
    "mps-renamed": _discovered(
        PRODUCT,
        _shared(sharing={**_MPS, "renamed": True}),
        resource="nvidia.com/gpu.shared",
        replicas=2,
        sharing="mps",
    ),
    "mig-single": _discovered(_HALF, {"nodePool": {"mig": _mig("3g.40gb")}}, mig="single"),
    "mig-mixed": _discovered(
        PRODUCT,
        {"nodePool": {"mig": _mig("3g.40gb", "Mixed")}},
        replicas=0,
        resource="nvidia.com/mig-3g.40gb",
        mig="mixed",
    ),
    "mig-single-time-slicing": _discovered(
        f"{PRODUCT}-MIG-7g.80gb-SHARED",
        _shared(mig=_mig("7g.80gb")),
        **_TIME_SLICING,
        mig="single",
    ),
    "mig-mixed-time-slicing-renamed": _discovered(
        PRODUCT,
        _shared(mig=_mig("7g.80gb", "Mixed"), sharing={"renamed": True}),
        replicas=0,
        resource="nvidia.com/mig-7g.80gb.shared",
        mig="mixed",
    ),
    "gke-time-sharing": _gke(_shared(), gpu_sharing_strategy="time-sharing", max_shared_clients_per_gpu="2"),
    "gke-mps": _gke(_shared(sharing=_MPS), gpu_sharing_strategy="mps", max_shared_clients_per_gpu="2"),
    "gke-mig": _gke({"nodePool": {"mig": _mig("3g.40gb")}}, gpu_partition_size="3g.40gb"),
}
"""Each node by name. On its platform, no other node is right for its spec."""
