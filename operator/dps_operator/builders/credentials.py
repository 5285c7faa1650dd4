"""The Secret with the random values of all DPSRouters of a namespace.

It has the same name in every namespace, because RBAC restricts access by name and not by label: the operator needs no
permission for any other Secret.
"""

import base64
from collections.abc import Mapping

from dps_operator.api import API_VERSION, KIND
from dps_operator.resources import MANAGED_BY, Component, Manifest, Router

CREDENTIALS = "dps-router-credentials"


def entry(router_name: str, component: Component, name: str) -> str:
    """The key of a value in the Secret."""
    return f"{router_name}-{component}.{name}"


def encoded(values: Mapping[str, str]) -> dict[str, str]:
    """Values as in the field `data` of a Secret."""
    return {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}


def credentials_secret(router: Router, data: Mapping[str, str]) -> Manifest:
    """What one DPSRouter contributes to the Secret.

    Each DPSRouter is an owner, so the Secret is garbage-collected with the last one. None of them controls it.
    """
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": router.name,
        "uid": router.uid,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": CREDENTIALS,
            "namespace": router.namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGED_BY, "app.kubernetes.io/part-of": "dps-router"},
            "ownerReferences": [owner],
        },
        "type": "Opaque",
        "data": dict(data),
    }
