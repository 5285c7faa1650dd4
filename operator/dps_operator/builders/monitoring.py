"""The ServiceMonitor of a DPSRouter."""

from dps_engines.pools import POOLS
from dps_operator.builders.mooncake import managed_master
from dps_operator.resources import COMPONENT_LABEL, ROUTER_LABEL, Manifest, Router, child


def service_monitor(router: Router) -> list[Manifest]:
    """One ServiceMonitor for the gateway, both pools and the Mooncake master; empty if the spec has none."""
    monitor = router.spec.telemetry.service_monitor
    if monitor is None:
        return []
    components = ["metrics", *POOLS]
    if managed_master(router) is not None:
        components.append("mooncake")
    manifest = child(
        router,
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        "metrics",
        spec={
            "selector": {
                "matchLabels": {ROUTER_LABEL: router.name},
                "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": components}],
            },
            # Each Service has one of these ports: the gateway's metrics Service has admin, the others have http.
            "endpoints": [
                {"port": port, "path": "/metrics", "interval": monitor.interval} for port in ("admin", "http")
            ],
            "targetLabels": [ROUTER_LABEL, COMPONENT_LABEL],
        },
    )
    manifest["metadata"]["labels"] |= monitor.labels
    return [manifest]
