"""Kinds, names, labels, annotations and owner references of the objects of a DPSRouter."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from dps_operator.api import API_VERSION, KIND, PLURAL

Manifest = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name of a DPSRouter."""
ChildKey = tuple[str, str]
"""Kind and name of a child of the DPSRouter."""
Component = Literal[
    "speculative",
    "greedy",
    "gateway",
    "redis",
    "models",
    "metrics",
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
CREDENTIALS = "dps-router-credentials"
"""The Secret with the random values of all DPSRouters of a namespace.

It has the same name in every namespace, because RBAC restricts access by name and not by label: the operator needs no
permission for any other Secret."""
OWNED_SELECTOR = f"app.kubernetes.io/managed-by={MANAGED_BY},{ROUTER_LABEL}"
"""Label selector of all child objects of DPSRouters, including pods."""


@dataclass(frozen=True)
class Owner:
    """A DPSRouter, as the owner of its children."""

    namespace: str
    name: str
    uid: str

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def reference(self) -> Manifest:
        """The owner reference of an object that is deleted with the DPSRouter."""
        identity = {"apiVersion": API_VERSION, "kind": KIND, "name": self.name, "uid": self.uid}
        return {**identity, "blockOwnerDeletion": True}


def child_name(router: Owner, component: Component) -> str:
    """`<router>-<component>`."""
    return f"{router.name}-{component}"


def selector(router: Owner, component: Component) -> dict[str, str]:
    """The labels that select a component's pods. They are immutable in a Deployment, so they contain only names."""
    return {
        "app.kubernetes.io/name": "dps-router",
        "app.kubernetes.io/instance": router.name,
        "app.kubernetes.io/component": component,
        ROUTER_LABEL: router.name,
        COMPONENT_LABEL: component,
    }


def labels(router: Owner, component: Component) -> dict[str, str]:
    """The labels of an object or a pod."""
    return selector(router, component) | {
        "app.kubernetes.io/managed-by": MANAGED_BY,
        "app.kubernetes.io/part-of": "dps-router",
    }


def child_manifest(
    router: Owner, kind: str, component: Component, annotations: dict[str, str] | None = None, **body: Any
) -> Manifest:
    """A child object, garbage-collected with the DPSRouter that owns it.

    body: the object's fields other than metadata."""
    metadata: Manifest = {
        "name": child_name(router, component),
        "namespace": router.namespace,
        "labels": labels(router, component),
        "ownerReferences": [router.reference | {"controller": True}],
    }
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": BY_NAME[kind].api_version, "kind": kind, "metadata": metadata, **body}


def credential_entry(router_name: str, component: Component, name: str) -> str:
    """The key of a value in the Secret CREDENTIALS."""
    return f"{router_name}-{component}.{name}"


def condition(body: Manifest, type: str) -> Manifest:
    """A condition of an object; empty if it has none of this type."""
    found = body.get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == type), {})


def given(**fields: Any) -> Manifest:
    """An object with these fields, except those that are None."""
    return {name: value for name, value in fields.items() if value is not None}


def digest(value: Any) -> str:
    """A short digest of a JSON value, which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kind:
    """A kind of object: API version, name, and plural name in URLs."""

    api_version: str
    name: str
    plural: str

    @property
    def group(self) -> str:
        """The API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """The version without the group."""
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """The URL path of one object, of a namespace's objects, or of all objects."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


ROUTER = Kind(API_VERSION, KIND, PLURAL)
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
SECRET = Kind("v1", "Secret", "secrets")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
CHILDREN = (
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    Kind("v1", "Service", "services"),
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("apps/v1", "Deployment", "deployments"),
    Kind("apps/v1", "StatefulSet", "statefulsets"),
    Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    Kind("batch/v1", "CronJob", "cronjobs"),
    Kind("networking.k8s.io/v1", "Ingress", "ingresses"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    Kind("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors"),
)
"""Every kind that a DPSRouter can own. The last two are served only if their CRDs are installed."""

BY_NAME = {kind.name: kind for kind in (ROUTER, POD, EVENT, SECRET, LEASE, *CHILDREN)}


def kind_of(manifest: Manifest) -> Kind:
    """The kind of a manifest."""
    return BY_NAME[manifest["kind"]]
