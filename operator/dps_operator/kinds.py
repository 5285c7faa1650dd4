"""The kinds of object that the operator manages, and their API paths."""

from dataclasses import dataclass

from dps_operator.api import API_VERSION, KIND, PLURAL
from dps_operator.resources import Manifest


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
