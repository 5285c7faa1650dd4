"""The DPSRouter `qwen` on the control plane: how it is applied, and its children."""

from typing import Any

from dps_testkit.cluster.kube import Kube, Manifest
from e2e.cluster.routers import router

EVERY_KIND = (
    "configmap,deployment,horizontalpodautoscaler,ingress,networkpolicy,persistentvolumeclaim,"
    "poddisruptionbudget,role,rolebinding,secret,service,serviceaccount,statefulset"
)
OWNED = "dpsrouter.io/router=qwen"
HASH = "dpsrouter.io/template-hash"
FATE = "dps-test/fate"
"""The annotation that determines how kwok makes a simulated pod fail (e2e/cluster/stages.yaml)."""


def children(kube: Kube) -> list[str]:
    """Kind and name of every object that belongs to the DPSRouter."""
    return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in kube.list(EVERY_KIND, OWNED))


def ready(kube: Kube, **change: Any) -> None:
    """Apply the DPSRouter with this change of its spec, and wait until it is ready."""
    kube.apply(router(**change))
    kube.until("qwen", Ready="True", Progressing="Settled")


def pods(kube: Kube, component: str) -> dict[str, Manifest]:
    """The pods of a component that are not being deleted, by name."""
    found = kube.list("pod", f"{OWNED},dpsrouter.io/component={component}")
    return {item["metadata"]["name"]: item for item in found if "deletionTimestamp" not in item["metadata"]}


def deployment(kube: Kube, component: str) -> Manifest:
    return kube.get("deployment", f"qwen-{component}")


def fate(kind: str) -> Manifest:
    """The part of a pool's spec that makes its simulated pods fail in this way."""
    return {"podTemplate": {"metadata": {"annotations": {FATE: kind}}}}
