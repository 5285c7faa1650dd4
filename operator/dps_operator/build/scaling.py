"""Horizontal autoscalers and pod disruption budgets."""

from dps_operator.effective import Router
from dps_operator.objects import Component, Manifest, child_manifest, child_name, selector


def _autoscaler(
    router: Router, component: Component, bounds: tuple[int, int], metric: Manifest, scale_down_seconds: int
) -> Manifest:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": child_name(router, component)}
    spec: Manifest = {
        "scaleTargetRef": target,
        "minReplicas": bounds[0],
        "maxReplicas": bounds[1],
        "metrics": [metric],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": scale_down_seconds}},
    }
    return child_manifest(router, "HorizontalPodAutoscaler", component, spec=spec)


def autoscalers(router: Router) -> list[Manifest]:
    """One HorizontalPodAutoscaler for each component with autoscaling."""
    manifests: list[Manifest] = []
    service = {"apiVersion": "v1", "kind": "Service", "name": child_name(router, "metrics")}
    for name, pool in router.pools.items():
        scaling = pool.spec.autoscaling
        if scaling is None or not pool.has_autoscaler:
            continue
        # Requests that all gateways have for the pool, divided by the pool's replicas. Those that wait count as well,
        # because a gateway sends an engine no more requests than it runs at the same time.
        metric = {
            "type": "Object",
            "object": {
                "describedObject": service,
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


def disruption_budgets(router: Router) -> list[Manifest]:
    """Budgets that let a drain evict one pod after another, for components that may have several replicas.

    A component that always has one replica needs none, because its only pod may be evicted anyway.
    """
    gateway = router.spec.gateway
    components: list[Component] = [
        name
        for name, pool in router.pools.items()
        if pool.min_replicas > 1 or pool.spec.autoscaling is not None or pool.spec.scaling == "External"
    ]
    if router.gateway_replicas > 1 or gateway.autoscaling is not None:
        components.append("gateway")
    # A pod that is not ready, such as one that crashes, must not block a drain.
    spec = {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return [
        child_manifest(
            router,
            "PodDisruptionBudget",
            component,
            spec=spec | {"selector": {"matchLabels": selector(router, component)}},
        )
        for component in components
    ]
