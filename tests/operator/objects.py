"""Kubernetes objects as the API server returns them, and the operator's observations of them."""

from typing import Any

from dps_operator.build.engine import engine_deployment
from dps_operator.build.gateway import gateway_deployment
from dps_operator.diagnose import Problem
from dps_operator.objects import Component, labels
from dps_operator.observe import Child, Pod, Replicas
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router

Manifest = dict[str, Any]

READY: Manifest = {"type": "Ready", "status": "True"}
"""The condition of a pod that is ready."""


def pod(name: str = "p", component: Component = "speculative", **status: Any) -> Manifest:
    """A pod of a component, with these status fields."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "serving", "labels": labels(router(SMALLEST), component)},
        "status": status,
    }


def waiting(reason: str, message: str = "", **container: Any) -> Manifest:
    """The status of a waiting container."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": "engine", "image": "sglang:1", "ready": False, "state": state, **container}


def replicas(
    ready: int = 1, desired: int = 1, *, settled: bool | None = None, failure: str = "", stalled: str = ""
) -> Replicas:
    """The replica counts of a workload; by default its rollout is complete if all replicas are ready.

    settled: whether the rollout is complete; if False, a pod of an old template remains.
    """
    return Replicas(
        desired=desired,
        existing=desired,
        ready=ready,
        settled=ready == desired if settled is None else settled,
        updated=settled is not False,
        failure=failure,
        stalled=stalled,
    )


def finished_rollout(live: Manifest, count: int) -> Manifest:
    """The status of a Deployment or StatefulSet whose newest template all of its replicas have."""
    return {
        "observedGeneration": live["metadata"]["generation"],
        "replicas": count,
        "updatedReplicas": count,
        "availableReplicas": count,
    }


def workload(name: str, observed: Replicas, template_hash: str = "", kind: str = "Deployment") -> Child:
    """The observation of a Deployment or StatefulSet."""
    return Child(
        kind=kind,
        name=f"qwen-{name}",
        uid=f"uid-{name}",
        owner_uid="uid-1",
        controlled_by_router=True,
        resource_version=1,
        owned="",
        owns_replicas=True,
        template_hash=template_hash,
        replicas=observed,
    )


def observed_pod(component: str, problem: Problem | None = None) -> Pod:
    """The observation of a pod."""
    return Pod(f"qwen-{component}-1", component, terminating=False, problem=problem)


def engine_pod(spec: Manifest, pool: Any = "greedy") -> Manifest:
    """The pod spec of a pool's engines."""
    found: Manifest = engine_deployment(router(spec), pool, SETTINGS)["spec"]["template"]["spec"]
    return found


def engine_container(spec: Manifest, pool: Any = "greedy") -> Manifest:
    """The only container of a pool's engines, without init containers."""
    (container,) = engine_pod(spec, pool)["containers"]
    found: Manifest = container
    return found


def gateway_pod(spec: Manifest) -> Manifest:
    """The pod spec of the gateways."""
    found: Manifest = gateway_deployment(router(spec), SETTINGS, "s")["spec"]["template"]["spec"]
    return found
