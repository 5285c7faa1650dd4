"""Horizontal autoscalers and pod disruption budgets."""

from typing import Literal

from dps_engines.pools import POOLS, PoolName
from dps_operator.api.gateway import DEFAULT_GATEWAY_REPLICAS
from dps_operator.api.pools import PoolSpec
from dps_operator.api.spec import Spec
from dps_operator.builders.pool_engines import pool_of
from dps_operator.resources import Component, Manifest, Router, child, child_name, selector


def _autoscaler(
    router: Router, component: Component, bounds: tuple[int, int], metric: Manifest, scale_down_seconds: int
) -> Manifest:
    return child(
        router,
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        component,
        spec={
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": child_name(router, component),
            },
            "minReplicas": bounds[0],
            "maxReplicas": bounds[1],
            "metrics": [metric],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": scale_down_seconds}},
        },
    )


def has_autoscaler(pool: PoolSpec) -> bool:
    """Whether a HorizontalPodAutoscaler scales the pool. A pool of at most one replica needs none."""
    scaling = pool.autoscaling
    return scaling is not None and (scaling.min_replicas > 0 or scaling.max_replicas > 1)


def autoscalers(router: Router) -> list[Manifest]:
    """One HorizontalPodAutoscaler for each component with autoscaling."""
    manifests: list[Manifest] = []
    for name in POOLS:
        pool = pool_of(router.spec, name)
        scaling = pool.autoscaling
        if scaling is None or not has_autoscaler(pool):
            continue
        # Requests that all gateways have for the pool, divided by the pool's replicas. Those that wait count as well,
        # because a gateway sends an engine no more requests than it runs at the same time.
        metric = {
            "type": "Object",
            "object": {
                "describedObject": {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "name": child_name(router, "metrics"),
                },
                "metric": {"name": "dps_demand", "selector": {"matchLabels": {"pool": name}}},
                "target": {"type": "AverageValue", "averageValue": str(scaling.target_in_flight_per_replica)},
            },
        }
        # The operator itself scales to zero, as not every cluster lets an autoscaler do so.
        bounds = (max(1, scaling.min_replicas), scaling.max_replicas)
        # Loading a model takes minutes, so replicas are removed only after a long period of low load.
        manifests.append(_autoscaler(router, name, bounds, metric, 900))
    gateway = router.spec.gateway.autoscaling
    if gateway is not None:
        target = {"type": "Utilization", "averageUtilization": gateway.target_cpu_percent}
        metric = {"type": "Resource", "resource": {"name": "cpu", "target": target}}
        bounds = (gateway.min_replicas, gateway.max_replicas)
        manifests.append(_autoscaler(router, "gateway", bounds, metric, 300))
    return manifests


Scaled = PoolName | Literal["gateway"]
"""The components whose number of replicas the spec or a controller determines."""


def min_replicas(spec: Spec, component: Scaled) -> int:
    """The minimum number of replicas of a component while it serves; 1 for a pool that is scaled externally."""
    if component == "gateway":
        gateway = spec.gateway
        return (
            gateway.autoscaling.min_replicas
            if gateway.autoscaling
            else gateway.replicas or DEFAULT_GATEWAY_REPLICAS
        )
    pool = pool_of(spec, component)
    return (pool.autoscaling.min_replicas if pool.autoscaling else pool.replicas) or 1


def _is_scaled(spec: Spec, component: Scaled) -> bool:
    """Whether an autoscaler or another controller changes the number of replicas."""
    if component == "gateway":
        return spec.gateway.autoscaling is not None
    pool = pool_of(spec, component)
    return pool.autoscaling is not None or pool.scaling == "External"


def disruption_budgets(router: Router) -> list[Manifest]:
    """Budgets that let a drain evict one pod after another, for components that may have several replicas.

    A component that always has one replica needs none, because its only pod may be evicted anyway.
    """
    components: tuple[Scaled, ...] = (*POOLS, "gateway")
    return [
        child(
            router,
            "policy/v1",
            "PodDisruptionBudget",
            component,
            spec={
                "maxUnavailable": 1,
                # A pod that is not ready, such as one that crashes, must not block a drain.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": selector(router, component)},
            },
        )
        for component in components
        if min_replicas(router.spec, component) > 1 or _is_scaled(router.spec, component)
    ]
