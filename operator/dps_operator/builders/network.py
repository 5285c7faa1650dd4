"""How traffic comes in, and where it may not: Ingress, HTTPRoute, NetworkPolicies."""

from dps_engines.pools import POOLS
from dps_operator.api.types import to_wire
from dps_operator.builders import store
from dps_operator.builders.gateway import ADMIN_PORT, PORT
from dps_operator.builders.launch import runtime_of
from dps_operator.resources import Component, Manifest, Router, child, child_name, selector

NETWORKING = "networking.k8s.io/v1"


def ingress(router: Router) -> list[Manifest]:
    """The Ingress, where the spec asks for one."""
    wanted = router.spec.gateway.ingress
    if wanted is None:
        return []
    backend = {"service": {"name": child_name(router, "gateway"), "port": {"name": "http"}}}
    path = {"path": "/", "pathType": "Prefix", "backend": backend}
    spec: Manifest = {"rules": [{"host": wanted.host, "http": {"paths": [path]}}]}
    if wanted.class_name is not None:
        spec["ingressClassName"] = wanted.class_name
    if wanted.tls_secret_name is not None:
        spec["tls"] = [{"hosts": [wanted.host], "secretName": wanted.tls_secret_name}]
    return [child(router, NETWORKING, "Ingress", "gateway", dict(wanted.annotations), spec=spec)]


def http_route(router: Router) -> list[Manifest]:
    """The HTTPRoute, where the spec asks for one."""
    wanted = router.spec.gateway.http_route
    if wanted is None:
        return []
    backend = {"name": child_name(router, "gateway"), "port": router.spec.gateway.service.port}
    spec: Manifest = {
        "parentRefs": [to_wire(parent) for parent in wanted.parent_refs],
        "rules": [{"backendRefs": [backend]}],
    }
    if wanted.hostnames:
        spec["hostnames"] = list(wanted.hostnames)
    return [child(router, "gateway.networking.k8s.io/v1", "HTTPRoute", "gateway", spec=spec)]


def _tcp(port: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port}]


def _policy(router: Router, component: Component, rules: list[Manifest], *, silent: bool = False) -> Manifest:
    """A policy on a component's pods: only `rules` come in; a silent one starts no connection itself."""
    spec: Manifest = {
        "podSelector": {"matchLabels": selector(router, component)},
        "policyTypes": ["Ingress", "Egress"] if silent else ["Ingress"],
        "ingress": rules,
    }
    return child(router, NETWORKING, "NetworkPolicy", component, spec=spec)


def network_policies(router: Router) -> list[Manifest]:
    """Where wanted: the gateway alone reaches engines and Redis, monitors and itself its admin port."""
    wanted = router.spec.network_policy
    if wanted is None:
        return []
    gateway: Manifest = {"podSelector": {"matchLabels": selector(router, "gateway")}}
    clients: Manifest = {"ports": _tcp(PORT)} | ({"from": wanted.clients} if wanted.clients else {})
    admin = {"from": [gateway, *wanted.monitoring], "ports": _tcp(ADMIN_PORT)}
    policies = [_policy(router, "gateway", [clients, admin])]
    engines = {"from": [gateway, *wanted.monitoring], "ports": _tcp(runtime_of(router.spec).port)}
    policies += [_policy(router, pool, [engines]) for pool in POOLS]
    if store.managed(router) is not None:
        policies.append(
            _policy(router, "redis", [{"from": [gateway], "ports": _tcp(store.PORT)}], silent=True)
        )
    return policies


def base_url(router: Router) -> str:
    """The base URL of clients: the ingress' host where there is one, otherwise the Service in the cluster."""
    gateway = router.spec.gateway
    if gateway.ingress is not None:
        scheme = "https" if gateway.ingress.tls_secret_name else "http"
        return f"{scheme}://{gateway.ingress.host}"
    return f"http://{child_name(router, 'gateway')}.{router.namespace}.svc:{gateway.service.port}"
