"""Creates the random values that the components of a DPSRouter share, each once, in one Secret per namespace.

The values are written with strategic merge patches, which change the values of one DPSRouter only. Server-side apply
could do so with a field manager for each DPSRouter, but the time of one call would be proportional to their number:
with 300 DPSRouters, calls took longer than the API server allows.
"""

import base64
import secrets

from dps_operator.build.gateway import ADMIN_TOKEN_KEY
from dps_operator.build.redis import AUTH_FILE, PASSWORD_KEY, URL_KEY, redis_url
from dps_operator.effective import Router
from dps_operator.errors import ClusterError, NotFoundError, RejectedError
from dps_operator.kube import Cluster
from dps_operator.objects import (
    CREDENTIALS,
    MANAGED_BY,
    SECRET,
    Component,
    Key,
    Manifest,
    credential_entry,
    digest,
)


def _entries(key: Key, component: Component, random: str) -> dict[str, str]:
    """The entries of a component, as in the field `data` of a Secret: the gateways' admin token, or Redis's password.

    key: that of the DPSRouter.
    """
    values = {ADMIN_TOKEN_KEY: random}
    if component == "redis":
        url = redis_url(*key, random)
        values = {PASSWORD_KEY: random, AUTH_FILE: f"requirepass {random}\n", URL_KEY: url}
    return {
        credential_entry(key[1], component, name): base64.b64encode(value.encode()).decode()
        for name, value in values.items()
    }


async def _live(cluster: Cluster, namespace: str) -> Manifest | None:
    try:
        return await cluster.get(SECRET, namespace, CREDENTIALS)
    except NotFoundError:
        return None


async def ensure_credentials(cluster: Cluster, router: Router) -> str:
    """Create the missing values of a DPSRouter. Returns a digest of those of a managed Redis; empty without one.

    Values that it no longer needs are kept until it is deleted. Each DPSRouter is an owner of the Secret, which is
    garbage-collected with the last one. None of them controls it. Raises RejectedError if the Secret was not created by
    the operator, or ClusterError.
    """
    live = await _live(cluster, router.namespace)
    metadata = live["metadata"] if live else {}
    if live and metadata.get("labels", {}).get("app.kubernetes.io/managed-by") != MANAGED_BY:
        raise RejectedError(
            f"Secret {CREDENTIALS}, which the operator uses, exists and was not created by it; delete the Secret"
        )
    known = live.get("data", {}) if live else {}
    wanted: dict[Component, dict[str, str]] = {}
    needed: list[Component] = ["gateway", "redis"] if router.redis is not None else ["gateway"]
    for component in needed:
        values = _entries(router.key, component, secrets.token_urlsafe(32))
        complete = all(name in known for name in values)
        wanted[component] = {name: known[name] for name in values} if complete else values
    data = {name: value for values in wanted.values() for name, value in values.items()}
    owned = router.uid in {owner["uid"] for owner in metadata.get("ownerReferences", [])}
    if not owned or not data.items() <= known.items():
        if live is None:
            labels = {"app.kubernetes.io/managed-by": MANAGED_BY, "app.kubernetes.io/part-of": "dps-router"}
            empty = {"name": CREDENTIALS, "namespace": router.namespace, "labels": labels}
            await cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": empty, "type": "Opaque"})
        change = {"metadata": {"ownerReferences": [router.reference]}, "data": data}
        await cluster.strategic_merge(SECRET, router.namespace, CREDENTIALS, change)
    return digest(wanted["redis"]) if "redis" in wanted else ""


async def forget_router(cluster: Cluster, key: Key) -> None:
    """Remove the values of a deleted DPSRouter. If it is the last one, the Secret is garbage-collected."""
    live = await _live(cluster, key[0])
    names = set(live.get("data", {})) if live else set()
    own = {*_entries(key, "gateway", ""), *_entries(key, "redis", "")}
    if live is None or names <= own or not names & own:
        return
    owners = live["metadata"].get("ownerReferences", [])
    change = {
        "metadata": {
            # With the UID, a Secret that has been deleted and created again in the meantime is not changed.
            "uid": live["metadata"]["uid"],
            "ownerReferences": [
                {"$patch": "delete", "uid": owner["uid"]} for owner in owners if owner["name"] == key[1]
            ],
        },
        "data": dict.fromkeys(names & own),
    }
    try:
        await cluster.strategic_merge(SECRET, key[0], CREDENTIALS, change)
    except ClusterError as error:
        if error.status not in (404, 409):  # it has been deleted in the meantime
            raise
