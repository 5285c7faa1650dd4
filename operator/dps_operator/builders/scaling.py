"""How many replicas there are, and how many a drain may take."""

from dps_engines.pools import POOLS
from dps_operator.api.gateway import DEFAULT_GATEWAY_REPLICAS
from dps_operator.builders.launch import pool_of
from dps_operator.resources import Component, Manifest, Router, child, child_name, selector


def _autoscaler(
    router: Router, component: Component, bounds: tuple[int, int], metric: Manifest, calm_seconds: int
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
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": calm_seconds}},
        },
    )


def autoscalers(router: Router) -> list[Manifest]:
    """One HorizontalPodAutoscaler for each part that the spec scales by load."""
    made: list[Manifest] = []
    for name in POOLS:
        scaling = pool_of(router.spec, name).autoscaling
        if scaling is None:
            continue
        # What the gateways have in flight at a pool, divided by its replicas.
        metric = {
            "type": "Object",
            "object": {
                "describedObject": {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "name": child_name(router, "metrics"),
                },
                "metric": {"name": "dps_in_flight", "selector": {"matchLabels": {"pool": name}}},
                "target": {"type": "AverageValue", "averageValue": str(scaling.target_in_flight_per_replica)},
            },
        }
        bounds = (scaling.min_replicas, scaling.max_replicas)
        # A replica takes minutes to load its model: give it up late.
        made.append(_autoscaler(router, name, bounds, metric, 900))
    gateway = router.spec.gateway.autoscaling
    if gateway is not None:
        target = {"type": "Utilization", "averageUtilization": gateway.target_cpu_percent}
        metric = {"type": "Resource", "resource": {"name": "cpu", "target": target}}
        bounds = (gateway.min_replicas, gateway.max_replicas)
        made.append(_autoscaler(router, "gateway", bounds, metric, 300))
    return made


def fewest_replicas(router: Router, component: Component) -> int:
    """The fewest replicas that the spec lets a component have."""
    if component == "gateway":
        gateway = router.spec.gateway
        return (
            gateway.autoscaling.min_replicas
            if gateway.autoscaling
            else gateway.replicas or DEFAULT_GATEWAY_REPLICAS
        )
    pool = pool_of(router.spec, "speculative" if component == "speculative" else "greedy")
    return pool.autoscaling.min_replicas if pool.autoscaling else pool.replicas or 1


def disruption_budgets(router: Router) -> list[Manifest]:
    """A drain takes one pod at a time. For a single replica there is none: it would block."""
    components: tuple[Component, ...] = (*POOLS, "gateway")
    return [
        child(
            router,
            "policy/v1",
            "PodDisruptionBudget",
            component,
            spec={"maxUnavailable": 1, "selector": {"matchLabels": selector(router, component)}},
        )
        for component in components
        if fewest_replicas(router, component) > 1
    ]
