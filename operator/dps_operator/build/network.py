"""Network access and monitoring: Ingress, HTTPRoute, NetworkPolicies and ServiceMonitor."""

from dps_engines.pools import POOLS
from dps_operator.api import to_wire
from dps_operator.build.engine import FIRST, WAITING, waits
from dps_operator.build.gateway import ADMIN_PORT, PORT
from dps_operator.build.prefix_cache import HTTP_PORT, MASTER_PORT
from dps_operator.build.redis import REDIS_PORT
from dps_operator.effective import Router
from dps_operator.objects import (
    COMPONENT_LABEL,
    ROUTER_LABEL,
    Component,
    Manifest,
    child_manifest,
    child_name,
    given,
    selector,
)


def ingress(router: Router) -> list[Manifest]:
    """The Ingress; empty if the spec has none."""
    settings = router.spec.gateway.ingress
    if settings is None:
        return []
    backend = {"service": {"name": child_name(router, "gateway"), "port": {"name": "http"}}}
    path = {"path": "/", "pathType": "Prefix", "backend": backend}
    tls = [{"hosts": [settings.host], "secretName": settings.tls_secret_name}]
    spec = given(
        rules=[{"host": settings.host, "http": {"paths": [path]}}],
        ingressClassName=settings.class_name,
        tls=None if settings.tls_secret_name is None else tls,
    )
    return [child_manifest(router, "Ingress", "gateway", dict(settings.annotations), spec=spec)]


def http_route(router: Router) -> list[Manifest]:
    """The HTTPRoute; empty if the spec has none."""
    settings = router.spec.gateway.http_route
    if settings is None:
        return []
    own = {
        "name": child_name(router, "gateway"),
        "port": router.spec.gateway.service.port,
        "weight": settings.weight,
    }
    rule = given(
        backendRefs=[own, *map(to_wire, settings.backend_refs)],
        # Streamed answers can take minutes; controllers apply a default, such as 15 s, to a rule without a timeout.
        timeouts={"request": settings.request_timeout},
        filters=list(settings.filters) or None,
    )
    parents, hosts = list(map(to_wire, settings.parent_refs)), list(settings.hostnames)
    spec = given(parentRefs=parents, rules=[rule], hostnames=hosts or None)
    return [child_manifest(router, "HTTPRoute", "gateway", spec=spec)]


def _tcp(port: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port}]


def _pods(router: Router, component: Component) -> Manifest:
    """A component's pods as a peer of a rule."""
    return {"podSelector": {"matchLabels": selector(router, component)}}


def _policy(router: Router, component: Component, rules: list[Manifest], *, egress: bool = True) -> Manifest:
    """A policy that allows only the ingress `rules` for a component's pods. Without `egress`, it denies all egress."""
    types = ["Ingress"] if egress else ["Ingress", "Egress"]
    spec = _pods(router, component) | {"policyTypes": types, "ingress": rules}
    return child_manifest(router, "NetworkPolicy", component, spec=spec)


def network_policies(router: Router) -> list[Manifest]:
    """Network policies; empty if the spec has none.

    Only the gateway can connect to Redis, only the gateway and `monitoring` to the engines, only `monitoring` and
    calibrations to the admin port, and only `clients` to the gateway's HTTP port. An engine can connect to the one on
    its GPU for which it waits. With Mooncake, engines connect to each other, on ports that they choose, and to the
    master, whose metrics `monitoring` reads.
    """
    settings = router.spec.network_policy
    if settings is None:
        return []
    gateway, engines = _pods(router, "gateway"), [_pods(router, pool) for pool in POOLS]
    clients: Manifest = {"ports": _tcp(PORT)} | ({"from": settings.clients} if settings.clients else {})
    readers = list(settings.monitoring)
    if router.spec.routing.calibration is not None:
        readers.append(_pods(router, "calibration"))
    # A rule without `from` would allow everybody.
    admin = [{"from": readers, "ports": _tcp(ADMIN_PORT)}] if readers else []
    policies = [_policy(router, "gateway", [clients, *admin])]
    peers = [gateway, *settings.monitoring]
    neighbour = [_pods(router, WAITING)] if waits(router, WAITING) else []
    cache = router.shared_cache
    transfers = [{"from": engines}] if cache is not None and cache.mooncake is not None else []
    for name, pool in router.pools.items():
        allowed = [*peers, *neighbour] if name == FIRST else peers
        rule = {"from": allowed, "ports": _tcp(pool.runtime.port)}
        policies.append(_policy(router, name, [rule, *transfers]))
    if router.mooncake_master is not None:
        rules: list[Manifest] = [{"from": engines, "ports": _tcp(MASTER_PORT)}]
        if settings.monitoring:
            rules.append({"from": settings.monitoring, "ports": _tcp(HTTP_PORT)})
        policies.append(_policy(router, "mooncake", rules, egress=False))
    if router.redis is not None:
        rule = {"from": [gateway], "ports": _tcp(REDIS_PORT)}
        policies.append(_policy(router, "redis", [rule], egress=False))
    return policies


def base_url(router: Router) -> str:
    """The base URL for clients: the host of the Ingress or the HTTPRoute if there is one, otherwise the Service."""
    gateway = router.spec.gateway
    route = gateway.http_route
    if gateway.ingress is not None:
        scheme = "https" if gateway.ingress.tls_secret_name else "http"
        return f"{scheme}://{gateway.ingress.host}"
    if route is not None and route.hostnames:
        scheme = "https" if "https" in (route.parent_refs[0].section_name or "") else "http"
        return f"{scheme}://{route.hostnames[0]}"
    scheme = "https" if gateway.tls is not None else "http"
    return f"{scheme}://{child_name(router, 'gateway')}.{router.namespace}.svc:{gateway.service.port}"


def service_monitor(router: Router) -> list[Manifest]:
    """One ServiceMonitor for the gateway, both pools and the Mooncake master; empty if the spec has none."""
    monitor = router.spec.telemetry.service_monitor
    if monitor is None:
        return []
    components = ["metrics", *POOLS]
    if router.mooncake_master is not None:
        components.append("mooncake")
    spec: Manifest = {
        "selector": {
            "matchLabels": {ROUTER_LABEL: router.name},
            "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": components}],
        },
        # Each Service has one of these ports: the gateway's metrics Service has admin, the others have http.
        "endpoints": [
            {"port": port, "path": "/metrics", "interval": monitor.interval} for port in ("admin", "http")
        ],
        "targetLabels": [ROUTER_LABEL, COMPONENT_LABEL],
    }
    manifest = child_manifest(router, "ServiceMonitor", "metrics", spec=spec)
    manifest["metadata"]["labels"] |= monitor.labels
    return [manifest]
