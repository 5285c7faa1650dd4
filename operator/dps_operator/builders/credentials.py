"""The Secret with the random values of all DPSRouters of a namespace.

It has the same name in every namespace, because RBAC restricts access by name and not by label: the operator needs no
permission for any other Secret.
"""

import base64
from collections.abc import Iterable, Mapping

from dps_operator.api import API_VERSION, KIND
from dps_operator.resources import MANAGED_BY, Component, Manifest, Router

CREDENTIALS = "dps-router-credentials"


def entry(router_name: str, component: Component, name: str) -> str:
    """The key of a value in the Secret."""
    return f"{router_name}-{component}.{name}"


def encoded(values: Mapping[str, str]) -> dict[str, str]:
    """Values as in the field `data` of a Secret."""
    return {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}


def empty_secret(namespace: str) -> Manifest:
    """The Secret before a DPSRouter contributes to it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": CREDENTIALS,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGED_BY, "app.kubernetes.io/part-of": "dps-router"},
        },
        "type": "Opaque",
    }


def contribution(router: Router, data: Mapping[str, str | None]) -> Manifest:
    """The strategic merge patch with the values of one DPSRouter. A value that is None is removed.

    Each DPSRouter is an owner, so the Secret is garbage-collected with the last one. None of them controls it.
    """
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": router.name,
        "uid": router.uid,
        "blockOwnerDeletion": True,
    }
    return {"metadata": {"ownerReferences": [owner]}, "data": dict(data)}


def withdrawal(secret: Manifest, router_name: str, names: Iterable[str]) -> Manifest:
    """The strategic merge patch that removes these values of a DPSRouter from the Secret, and it from the owners.

    With the UID, a Secret that has been deleted and created again in the meantime is not changed.
    """
    owners = secret["metadata"].get("ownerReferences", [])
    return {
        "metadata": {
            "uid": secret["metadata"]["uid"],
            "ownerReferences": [
                {"$patch": "delete", "uid": owner["uid"]} for owner in owners if owner["name"] == router_name
            ],
        },
        "data": dict.fromkeys(names),
    }
