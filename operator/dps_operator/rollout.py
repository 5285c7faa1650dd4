"""The order of rollouts, the pod templates that pools keep, and what is kept until the end of all rollouts.

This module performs no I/O.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from dps_engines.pools import POOLS, PoolName, other_pool
from dps_operator.api import REVISIONS
from dps_operator.effective import Router
from dps_operator.objects import (
    COMPONENT_LABEL,
    SPEC_HASH,
    TEMPLATE_HASH,
    ChildKey,
    Component,
    Manifest,
    child_name,
)
from dps_operator.observe import NO_REPLICAS, Child

USED_BY_PODS: Final[Sequence[Component]] = ("redis", "models", "engine-cache", "mooncake")
"""Components that engines or gateways of the present template may use, and whose objects may contain data."""


def pool_on_hold(
    desired: list[Manifest], observed: Mapping[str, Child], kept: Collection[str] = ()
) -> PoolName | None:
    """The pool whose new pod template has to wait, if any; `observed` has the engine Deployments by pool.

    kept: pools that keep their pod template, so they do not change.

    While both pools serve, the second one to change waits until no pod of an old template remains in the first, so
    a broken engine configuration takes down at most one pool. A pool that is already down never blocks the
    other, so that a corrected spec can be rolled out to both, unless the rollout would make the only pool that serves
    unavailable. Missing or unready replicas alone do not block a rollout.
    """
    engines = _engines(desired)
    hashes = {pool: manifest["metadata"]["annotations"][TEMPLATE_HASH] for pool, manifest in engines.items()}
    changing = [
        pool
        for pool in POOLS
        if pool in observed and pool not in kept and observed[pool].template_hash != hashes.get(pool)
    ]
    replicas = {pool: observed[pool].replicas if pool in observed else NO_REPLICAS for pool in POOLS}
    for pool in reversed(changing):
        other = other_pool(pool)
        if not replicas[pool].ready:
            continue
        if not replicas[other].ready:
            if replicas[other].desired and _interrupts(engines.get(pool, {})):
                return pool
            continue
        other_first = other in changing and POOLS.index(other) < POOLS.index(pool)
        if other_first or not replicas[other].updated:
            return pool
    return None


def rolled_out(desired: Sequence[Manifest], observed: Mapping[ChildKey, Child]) -> bool:
    """Whether no pod of an older template remains in any of the desired Deployments."""
    names = [manifest["metadata"]["name"] for manifest in desired if manifest["kind"] == "Deployment"]
    found = [observed.get(("Deployment", name)) for name in names]
    return all(one is not None and one.replicas.updated for one in found)


def still_used(router: Router, desired: Sequence[Manifest]) -> set[str]:
    """The names of the components that are no longer desired and that pods of an older template may use.

    All objects of such a component have its name. They are kept together: without its NetworkPolicy, for example, a
    Redis that is kept would be accessible to all pods.
    """
    names = {manifest["metadata"]["name"] for manifest in desired}
    return {child_name(router, component) for component in USED_BY_PODS} - names


def _engines(desired: Sequence[Manifest]) -> dict[str, Manifest]:
    """The Deployments of the engines among the desired objects, by pool."""
    return {
        manifest["metadata"]["labels"][COMPONENT_LABEL]: manifest
        for manifest in desired
        if TEMPLATE_HASH in manifest["metadata"].get("annotations", {})
    }


def _interrupts(deployment: Manifest) -> bool:
    """Whether a rollout of the Deployment may leave it without available replicas."""
    strategy = deployment.get("spec", {}).get("strategy", {})
    unavailable = strategy.get("rollingUpdate", {}).get("maxUnavailable", 0)
    return strategy.get("type") == "Recreate" or unavailable not in (0, "0%")


def kept_pools(router: Router, desired: Sequence[Manifest], observed: Mapping[str, Child]) -> list[PoolName]:
    """The pools that keep their pod template although the operator generates another one for the same spec.

    A pool without ready replicas keeps nothing, because a change interrupts no request and may repair it.
    """
    if router.spec.engine.upgrade_policy == "Automatic":
        return []
    annotations = {pool: one["metadata"]["annotations"] for pool, one in _engines(desired).items()}
    return [
        pool
        for pool in POOLS
        if pool in observed
        and observed[pool].replicas.ready > 0
        and observed[pool].spec_hash == annotations[pool][SPEC_HASH]
        and observed[pool].template_hash != annotations[pool][TEMPLATE_HASH]
    ]


def history(
    engine: Child | None, before: Sequence[Mapping[str, Any]], generation: int, now: str
) -> list[Mapping[str, Any]]:
    """A pool's revisions, newest first. before: the previous list. now: the time in RFC 3339."""
    known = before[0]["revision"] if before else ""
    if engine is None or engine.template_hash in ("", known):
        return list(before)
    newest = {
        "revision": engine.template_hash,
        "engine": engine.engine,
        "image": engine.image,
        "generation": generation,
        "time": now,
    }
    return [newest, *before][:REVISIONS]
