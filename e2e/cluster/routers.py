"""DPSRouters for tests."""

from typing import Any

from dps_testkit.cluster.kube import Manifest

GONE = object()
"""In a change: the field is removed. None is a null, which the API tells apart."""


def merged(base: Manifest, change: Manifest) -> Manifest:
    """`change` over `base`, object by object."""
    result = dict(base)
    for key, value in change.items():
        if value is GONE:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def router(name: str = "qwen", **change: Any) -> Manifest:
    """The smallest DPSRouter, with a change of its spec by top-level field."""
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
    """A change of spec.pools that makes this the whole speculation."""
    empty = {"algorithm": GONE, "draftModel": GONE}
    return {"pools": {"speculative": {"speculation": {**empty, **fields}}}}
