"""Checks of free objects: the parts that the operator reads or merges must be objects or lists of objects.

The API server checks everything else when the children are applied.
"""

from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""The lists of generated pods that merge by a key, and their keys, as in a strategic merge patch. Other lists are
replaced."""


def _object(parent: dict[str, Any], field: str) -> dict[str, Any]:
    """A member of an object; empty if it is unset or null. Raises ValueError if it is not an object."""
    value = parent.get(field)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{field} must be an object")
    return value or {}


def _objects(parent: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """A member of an object; empty if it is unset or null. Raises ValueError if it is not a list of objects."""
    value = parent.get(field)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise ValueError(f"{field} must be a list of objects")
    return value or []


def _check_merged_lists(parent: dict[str, Any]) -> None:
    """Raises ValueError if a list of a pod or container cannot be merged by its key."""
    for field, key in MERGE_KEYS.items():
        for item in _objects(parent, field):
            if isinstance(item.get(key), dict | list):
                raise ValueError(f"{key} must be a single value in the items of {field}")


def checked_pod_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The pod spec. Raises ValueError if it cannot be merged into a generated one."""
    _check_merged_lists(spec)
    for container in (*_objects(spec, "containers"), *_objects(spec, "initContainers")):
        _check_merged_lists(container)
        _object(_object(container, "resources"), "limits")
        _object(container, "startupProbe")
    return spec


def checked_affinity(affinity: dict[str, Any]) -> dict[str, Any]:
    """The affinity. Raises ValueError if it cannot be combined with a generated one."""
    required = _object(_object(affinity, "nodeAffinity"), "requiredDuringSchedulingIgnoredDuringExecution")
    for term in _objects(required, "nodeSelectorTerms"):
        _objects(term, "matchExpressions")
        _objects(term, "matchFields")
    _objects(_object(affinity, "podAffinity"), "preferredDuringSchedulingIgnoredDuringExecution")
    return affinity


def without_nulls(value: Any) -> Any:
    """The value without the members of objects that are null, which Kubernetes does not distinguish from unset ones."""
    if isinstance(value, dict):
        return {field: without_nulls(member) for field, member in value.items() if member is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
