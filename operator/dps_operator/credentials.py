"""Creates the random values that the components of a DPSRouter share, each once, in one Secret per namespace."""

import secrets
from collections.abc import Callable, Mapping, Sequence

from dps_operator.builders.credentials import CREDENTIALS, credentials_secret, encoded
from dps_operator.builders.gateway import admin_entries
from dps_operator.builders.prefix_cache import cache_entries, common
from dps_operator.builders.store import managed, redis_entries
from dps_operator.cluster import Cluster
from dps_operator.errors import ClusterError, NotFoundError, RejectedError
from dps_operator.kinds import SECRET
from dps_operator.observe import Key
from dps_operator.resources import MANAGED_BY, Component, Manifest, Router, digest

ENTRIES: Mapping[Component, Callable[[str, str, str], dict[str, str]]] = {
    "gateway": admin_entries,
    "redis": redis_entries,
    "prefix-cache": cache_entries,
}
"""Builders of a component's values, from the namespace and name of the DPSRouter and a random value."""


def _components(router: Router) -> Sequence[Component]:
    """The components that need a random value."""
    needed: list[Component] = ["gateway"]
    if managed(router) is not None:
        needed.append("redis")
    cache = common(router.spec)
    if cache is not None and cache.file is not None:
        needed.append("prefix-cache")
    return needed


def _manager(name: str) -> str:
    """The field manager of one DPSRouter's part, so that applying it does not change the parts of the others."""
    return f"{MANAGED_BY}.{name}"


def _own_keys(key: Key) -> set[str]:
    return {name for entries in ENTRIES.values() for name in entries(*key, "")}


async def _live(cluster: Cluster, namespace: str) -> Manifest | None:
    try:
        return await cluster.get(SECRET, namespace, CREDENTIALS)
    except NotFoundError:
        return None


async def credentials(cluster: Cluster, router: Router) -> dict[Component, str]:
    """Create the missing values of a DPSRouter, and remove those that it no longer needs.

    Returns a digest of each component's values. Raises RejectedError if the Secret was not created by the operator, or
    ClusterError.
    """
    key = router.key
    live = await _live(cluster, router.namespace)
    metadata = live["metadata"] if live else {}
    if live and metadata.get("labels", {}).get("app.kubernetes.io/managed-by") != MANAGED_BY:
        raise RejectedError(
            f"Secret {CREDENTIALS}, which the operator uses, exists and was not created by it; delete the Secret"
        )
    known = live.get("data", {}) if live else {}
    wanted: dict[Component, dict[str, str]] = {}
    for component in _components(router):
        values = encoded(ENTRIES[component](*key, secrets.token_urlsafe(32)))
        complete = all(name in known for name in values)
        wanted[component] = {name: known[name] for name in values} if complete else values
    data = {name: value for values in wanted.values() for name, value in values.items()}
    owned = router.uid in {owner["uid"] for owner in metadata.get("ownerReferences", [])}
    current = {name: value for name, value in known.items() if name in _own_keys(key)}
    if data != current or (data and not owned):
        await cluster.apply(credentials_secret(router, data), manager=_manager(router.name))
    return {component: digest(values) for component, values in wanted.items()}


async def release(cluster: Cluster, key: Key) -> None:
    """Remove the values of a deleted DPSRouter. If it is the last one, the Secret is garbage-collected."""
    live = await _live(cluster, key[0])
    names = set(live.get("data", {})) if live else set()
    if live is None or names <= _own_keys(key) or not names & _own_keys(key):
        return
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        # With the UID, a Secret that has been deleted in the meantime is not created again.
        "metadata": {"name": CREDENTIALS, "namespace": key[0], "uid": live["metadata"]["uid"]},
    }
    try:
        await cluster.apply(manifest, manager=_manager(key[1]))
    except ClusterError as error:
        if error.status != 409:
            raise
