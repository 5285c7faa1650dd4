"""Creates the random values that the components of a DPSRouter share, each once, in one Secret per namespace.

The values are written with strategic merge patches, which change the values of one DPSRouter only. Server-side apply
could do so with a field manager for each DPSRouter, but the time of one call would be proportional to their number:
with 300 DPSRouters, calls took longer than the API server allows.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dps_operator.builders.credentials import CREDENTIALS, contribution, empty_secret, encoded, withdrawal
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


def _own_keys(key: Key) -> set[str]:
    return {name for entries in ENTRIES.values() for name in entries(*key, "")}


@dataclass(frozen=True)
class Credentials:
    """What the Secret contains for one DPSRouter."""

    revisions: Mapping[Component, str]
    """A digest of each component's values."""
    unneeded: Collection[str]
    """The names of the values of components that the spec no longer has."""


async def _live(cluster: Cluster, namespace: str) -> Manifest | None:
    try:
        return await cluster.get(SECRET, namespace, CREDENTIALS)
    except NotFoundError:
        return None


async def ensure(cluster: Cluster, router: Router) -> Credentials:
    """Create the missing values of a DPSRouter. Values that it no longer needs are kept, see `withdraw`.

    Raises RejectedError if the Secret was not created by the operator, or ClusterError.
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
    if not owned or not data.items() <= known.items():
        if live is None:
            await cluster.apply(empty_secret(router.namespace))
        await cluster.strategic_merge(SECRET, router.namespace, CREDENTIALS, contribution(router, data))
    revisions = {component: digest(values) for component, values in wanted.items()}
    return Credentials(revisions, (_own_keys(key) & known.keys()) - data.keys())


async def withdraw(cluster: Cluster, router: Router, names: Collection[str]) -> None:
    """Remove values that no component of a DPSRouter needs, and that no pod refers to. Raises ClusterError."""
    if names:
        change = contribution(router, dict.fromkeys(names))
        await cluster.strategic_merge(SECRET, router.namespace, CREDENTIALS, change)


async def release(cluster: Cluster, key: Key) -> None:
    """Remove the values of a deleted DPSRouter. If it is the last one, the Secret is garbage-collected."""
    live = await _live(cluster, key[0])
    names = set(live.get("data", {})) if live else set()
    if live is None or names <= _own_keys(key) or not names & _own_keys(key):
        return
    try:
        change = withdrawal(live, key[1], names & _own_keys(key))
        await cluster.strategic_merge(SECRET, key[0], CREDENTIALS, change)
    except ClusterError as error:
        if error.status not in (404, 409):  # it has been deleted in the meantime
            raise
