"""Pod templates: the secure base, and what a user lays over it."""

from typing import Any

from dps_operator.api.types import PodTemplate, Resources
from dps_operator.resources import Component, Manifest, Router, labels, selector

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
}
"""Lists that merge by a key, as in a strategic merge patch of a pod spec; other lists are replaced."""

CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def overlay(base: Any, over: Any, key: str = "") -> Any:
    """`over` laid on `base`: objects by field, keyed lists by key, the rest replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(base)
        for field, value in over.items():
            merged[field] = overlay(base[field], value, field) if field in base else value
        return merged
    merge_key = MERGE_KEYS.get(key)
    if merge_key and isinstance(base, list) and isinstance(over, list):
        by_key = {item.get(merge_key): item for item in base}
        for item in over:
            known = by_key.get(item.get(merge_key))
            by_key[item.get(merge_key)] = overlay(known, item) if known else item
        return list(by_key.values())
    return over


def resources(defaults: Manifest, wanted: Resources) -> Manifest:
    """A container's resources: the defaults, and over them what the spec says."""
    over = {"requests": wanted.requests or {}, "limits": wanted.limits or {}}
    merged = {part: {**defaults.get(part, {}), **over[part]} for part in over}
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


def pod_template(
    router: Router,
    component: Component,
    spec: Manifest,
    over: PodTemplate | None = None,
    annotations: dict[str, str] | None = None,
) -> Manifest:
    """The pod template of a component with the user's laid over it; the selector's labels always stay."""
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
    """Replicas on different nodes where there is room."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(router, component)},
        }
    ]
