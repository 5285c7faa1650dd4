"""Pod templates: secure defaults, merged with the user's template."""

from typing import Any

from dps_operator.api.shapes import MERGE_KEYS
from dps_operator.api.types import PodTemplate, Resources, quantity_value
from dps_operator.resources import Component, Manifest, Router, labels, selector
from dps_operator.settings import Settings

_HANDLERS = frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})
UNIONS = {
    "env": frozenset({"value", "valueFrom"}),
    "startupProbe": _HANDLERS,
    "readinessProbe": _HANDLERS,
    "livenessProbe": _HANDLERS,
    "preStop": _HANDLERS,
    "postStart": _HANDLERS,
}
"""Fields of which an object may have only one, by the field that holds the object. In a volume, which is not listed,
these are all fields except the name."""

CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def _without_alternatives(base: Manifest, over: Manifest, key: str) -> Manifest:
    """`base` without the members of a union that exclude the one that `over` sets, as `emptyDir` does `hostPath`."""
    members = (base.keys() | over.keys()) - {"name"} if key == "volumes" else UNIONS.get(key, frozenset())
    if not members & over.keys():
        return base
    return {field: value for field, value in base.items() if field not in members or field in over}


def overlay(base: Any, over: Any, key: str = "") -> Any:
    """`base` merged with `over`: objects by field, keyed lists by key; other values are replaced.

    A member of a union, such as the source of a volume, replaces a different member. key: name of the field that
    holds the two values, which selects the merge key of a list and the union of an object."""
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(_without_alternatives(base, over, key))
        for field, value in over.items():
            merged[field] = overlay(merged[field], value, field) if field in merged else value
        return merged
    merge_key = MERGE_KEYS.get(key)
    if merge_key and isinstance(base, list) and isinstance(over, list):
        by_key = {item.get(merge_key): item for item in base}
        for item in over:
            existing = by_key.get(item.get(merge_key))
            by_key[item.get(merge_key)] = overlay(existing, item, key) if existing else item
        return list(by_key.values())
    return over


def container_resources(defaults: Manifest, overrides: Resources) -> Manifest:
    """A container's resources: the defaults, overridden by the spec.

    The API server refuses a request above the limit, so a default request is lowered to a limit of the spec, and a
    default limit is raised to a request of the spec.
    """
    limits, requests = overrides.limits or {}, overrides.requests or {}
    lowered = {
        name: min(amount, limits.get(name, amount), key=quantity_value)
        for name, amount in defaults.get("requests", {}).items()
    }
    raised = {
        name: max(amount, requests.get(name, amount), key=quantity_value)
        for name, amount in defaults.get("limits", {}).items()
    }
    merged = {"requests": {**lowered, **requests}, "limits": {**raised, **limits}}
    return {part: amounts for part, amounts in merged.items() if amounts}


def restricted(user: int) -> tuple[Manifest, Manifest]:
    """Pod and container security contexts that satisfy the restricted Pod Security Standard."""
    pod = {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return pod, CONTAINER_SECURITY | {"readOnlyRootFilesystem": True}


def pull_secrets(settings: Settings) -> Manifest:
    """The field `imagePullSecrets` of a pod; empty if there are none."""
    names = [{"name": name} for name in settings.pull_secrets]
    return {"imagePullSecrets": names} if names else {}


def pod_template(
    router: Router,
    component: Component,
    spec: Manifest,
    over: PodTemplate | None = None,
    annotations: dict[str, str] | None = None,
) -> Manifest:
    """The pod template of a component, merged with the user's. Labels of the selector cannot be overridden."""
    template: Manifest = {
        "metadata": {"labels": labels(router, component)},
        "spec": {
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            **spec,
        },
    }
    if annotations:
        template["metadata"]["annotations"] = annotations
    if over is not None:
        template = overlay(template, over.model_dump(by_alias=True, exclude_none=True))
        template["metadata"]["labels"] |= labels(router, component)
    return template


def spread(router: Router, component: Component) -> list[Manifest]:
    """Prefers different zones and nodes for the replicas of a component."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(router, component)},
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]
