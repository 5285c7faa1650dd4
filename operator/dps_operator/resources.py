"""Names, labels, annotations and owner references of the child objects of a DPSRouter."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from dps_engines.pools import PoolName
from dps_operator.api import API_VERSION, KIND
from dps_operator.api.spec import Spec
from dps_operator.model_sizes import ModelSizes

Manifest = dict[str, Any]
Component = Literal[
    "speculative",
    "greedy",
    "gateway",
    "redis",
    "models",
    "metrics",
    "prefix-cache",
    "engine-cache",
    "mooncake",
    "calibration",
]

NEIGHBOUR_CONTAINER = "wait-for-neighbour"
"""Name of the init container in which an engine waits for the other one on its GPU."""
MODELS = "/models"
"""Where engines mount the volume for downloaded models."""
ROUTER_LABEL = "dpsrouter.io/router"
COMPONENT_LABEL = "dpsrouter.io/component"
MANAGED_BY = "dps-operator"
"""Value of the label app.kubernetes.io/managed-by, and field manager of server-side apply."""
TEMPLATE_HASH = "dpsrouter.io/template-hash"
"""Annotation of an engine Deployment: digest of the generated pod template."""
SPEC_HASH = "dpsrouter.io/spec-hash"
"""Annotation of an engine Deployment: digest of the fields of the spec that its pod template depends on."""
ENGINE = "dpsrouter.io/engine"
"""Annotation of an engine Deployment: runtime and version of the engines."""
STARTUP_CONFIG_HASH = "dpsrouter.io/startup-config-hash"
"""Annotation of the gateway's pods: digest of the configuration read only at startup and of the Redis credentials. A
change restarts the gateways."""
OWNED_SELECTOR = f"app.kubernetes.io/managed-by={MANAGED_BY},{ROUTER_LABEL}"
"""Label selector of all child objects of DPSRouters, including pods."""


@dataclass(frozen=True)
class Router:
    """A DPSRouter with a valid spec."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec
    sizes: ModelSizes = field(default_factory=ModelSizes)

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name


def child_name(router: Router, component: Component) -> str:
    """`<router>-<component>`."""
    return f"{router.name}-{component}"


def engine_key(router_name: str, pool: PoolName) -> tuple[str, str]:
    """Kind and name of a pool's Deployment, by which observed children are found."""
    return "Deployment", f"{router_name}-{pool}"


def selector(router: Router, component: Component) -> dict[str, str]:
    """The labels that select a component's pods. They are immutable in a Deployment, so they contain only names."""
    return {
        "app.kubernetes.io/name": "dps-router",
        "app.kubernetes.io/instance": router.name,
        "app.kubernetes.io/component": component,
        ROUTER_LABEL: router.name,
        COMPONENT_LABEL: component,
    }


def labels(router: Router, component: Component) -> dict[str, str]:
    """The labels of an object or a pod."""
    return selector(router, component) | {
        "app.kubernetes.io/managed-by": MANAGED_BY,
        "app.kubernetes.io/part-of": "dps-router",
    }


def child(
    router: Router,
    api_version: str,
    kind: str,
    component: Component,
    annotations: dict[str, str] | None = None,
    **body: Any,
) -> Manifest:
    """A child object, garbage-collected with the DPSRouter that owns it.

    body: the object's fields other than metadata."""
    metadata: Manifest = {
        "name": child_name(router, component),
        "namespace": router.namespace,
        "labels": labels(router, component),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": router.name,
                "uid": router.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def digest(value: Any) -> str:
    """A short digest of a JSON value, which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
