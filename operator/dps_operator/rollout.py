"""Decides which pool's rollout has to wait for the other pool. This module performs no I/O."""

from collections.abc import Collection, Mapping

from dps_engines.pools import POOLS
from dps_operator.observe import Child
from dps_operator.resources import COMPONENT_LABEL, TEMPLATE_HASH, Manifest


def pool_on_hold(
    desired: list[Manifest], observed: Mapping[str, Child], kept: Collection[str] = ()
) -> str | None:
    """The pool whose new pod template has to wait, if any; `observed` has the engine Deployments by pool.

    kept: pools that keep their pod template, so they do not change.

    While both pools serve, the second one to change waits until no pod of an old template remains in the first, so
    a broken engine configuration takes down at most one pool. A pool that is already down never blocks the
    other, so that a corrected spec can be rolled out to both, unless the rollout would make the only pool that serves
    unavailable. Missing or unready replicas alone do not block a rollout.
    """
    engines = {
        manifest["metadata"]["labels"][COMPONENT_LABEL]: manifest
        for manifest in desired
        if TEMPLATE_HASH in manifest["metadata"].get("annotations", {})
    }
    hashes = {pool: manifest["metadata"]["annotations"][TEMPLATE_HASH] for pool, manifest in engines.items()}
    changing = [
        pool
        for pool in POOLS
        if pool in observed and pool not in kept and observed[pool].template_hash != hashes.get(pool)
    ]
    for pool in reversed(changing):
        (other,) = (name for name in POOLS if name != pool)
        if not _serves(observed[pool]):
            continue
        if not _serves(observed.get(other)):
            if _expected(observed.get(other)) and _interrupts(engines.get(pool, {})):
                return pool
            continue
        other_first = other in changing and POOLS.index(other) < POOLS.index(pool)
        if other_first or not _updated(observed.get(other)):
            return pool
    return None


def _serves(child: Child | None) -> bool:
    return child is not None and child.replicas is not None and child.replicas.ready > 0


def _expected(child: Child | None) -> bool:
    return child is not None and child.replicas is not None and child.replicas.desired > 0


def _interrupts(deployment: Manifest) -> bool:
    """Whether a rollout of the Deployment may leave it without available replicas."""
    strategy = deployment.get("spec", {}).get("strategy", {})
    unavailable = strategy.get("rollingUpdate", {}).get("maxUnavailable", 0)
    return strategy.get("type") == "Recreate" or unavailable not in (0, "0%")


def _updated(child: Child | None) -> bool:
    return child is not None and child.replicas is not None and child.replicas.updated
