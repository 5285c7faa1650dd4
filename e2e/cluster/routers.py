"""DPSRouter manifests for tests."""

from typing import Any

from dps_testkit.cluster.kube import Manifest

REMOVED = object()
"""Marks a field that a change removes; None is an explicit null, which the API treats differently."""


def merged(base: Manifest, change: Manifest) -> Manifest:
    """Merge `change` into `base`, recursively for objects."""
    result = dict(base)
    for key, value in change.items():
        if value is REMOVED:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def router(name: str = "qwen", **change: Any) -> Manifest:
    """A minimal DPSRouter with changes to its spec, by top-level field."""
    spec: Manifest = {
        "model": {"name": "Qwen/Qwen2.5-7B-Instruct"},
        "pools": {
            "speculative": {
                "speculation": {"algorithm": "Standalone", "draftModel": "Qwen/Qwen2.5-1.5B-Instruct"}
            }
        },
    }
    return {
        "apiVersion": "dpsrouter.io/v1alpha1",
        "kind": "DPSRouter",
        "metadata": {"name": name},
        "spec": merged(spec, change),
    }


def speculation(**fields: Any) -> Manifest:
    """A change to spec.pools that replaces the whole speculation object."""
    empty = {"algorithm": REMOVED, "draftModel": REMOVED}
    return {"pools": {"speculative": {"speculation": {**empty, **fields}}}}
