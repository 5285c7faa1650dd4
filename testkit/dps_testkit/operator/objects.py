"""Objects as the API server gives them, for tests of what the operator sees."""

from typing import Any

from dps_operator.diagnose import Trouble
from dps_operator.observe import Child, Pod, Replicas
from dps_operator.resources import Component, labels
from dps_testkit.operator.routers import SMALLEST, router

Manifest = dict[str, Any]


def pod(name: str = "p", component: Component = "speculative", **status: Any) -> Manifest:
    """A pod of a component with this status."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "serving", "labels": labels(router(SMALLEST), component)},
        "status": status,
    }


def waiting(reason: str, message: str = "", **container: Any) -> Manifest:
    """A container's status while it waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": "engine", "image": "sglang:1", "ready": False, "state": state, **container}


def replicas(ready: int = 1, wanted: int = 1, *, settled: bool | None = None, failure: str = "") -> Replicas:
    """A workload's replicas; settled where all of them are ready."""
    return Replicas(wanted, wanted, ready, ready == wanted if settled is None else settled, failure)


def workload(name: str, seen: Replicas, template_hash: str = "", kind: str = "Deployment") -> Child:
    """A Deployment or StatefulSet as it is remembered."""
    return Child(
        kind=kind,
        name=f"qwen-{name}",
        uid=f"uid-{name}",
        owner_uid="uid-1",
        predecessor=True,
        resource_version=1,
        owned="",
        owns_replicas=True,
        template_hash=template_hash,
        replicas=seen,
    )


def remembered_pod(component: str, trouble: Trouble | None = None) -> Pod:
    """A pod as it is remembered."""
    return Pod(f"qwen-{component}-1", component, "", leaving=False, trouble=trouble)
