"""What a Prometheus operator needs to scrape the deployment."""

from dps_engines.pools import POOLS
from dps_operator.resources import COMPONENT_LABEL, ROUTER_LABEL, Manifest, Router, child


def service_monitor(router: Router) -> list[Manifest]:
    """One ServiceMonitor for the gateway's admin port and both pools, where the spec asks for one."""
    wanted = router.spec.telemetry.service_monitor
    if wanted is None:
        return []
    made = child(
        router,
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        "metrics",
        spec={
            "selector": {
                "matchLabels": {ROUTER_LABEL: router.name},
                "matchExpressions": [
                    {"key": COMPONENT_LABEL, "operator": "In", "values": ["metrics", *POOLS]}
                ],
            },
            # A Service has one of the two ports: metrics the first, a pool the second.
            "endpoints": [
                {"port": port, "path": "/metrics", "interval": wanted.interval} for port in ("admin", "http")
            ],
            "targetLabels": [ROUTER_LABEL, COMPONENT_LABEL],
        },
    )
    made["metadata"]["labels"] |= wanted.labels
    return [made]
