"""Serializes the rollouts of the two pools: decides which pool's Deployment has to wait.

This module performs no I/O.
"""

from collections.abc import Mapping

from dps_engines.pools import POOLS
from dps_operator.observe import Child
from dps_operator.resources import COMPONENT_LABEL, TEMPLATE_HASH, Manifest


def pool_on_hold(desired: list[Manifest], observed: Mapping[str, Child]) -> str | None:
    """The pool whose new pod template has to wait, if any; `observed` has the engine Deployments by pool.

    While both pools serve, the second one to change waits until no pod of an old template remains in the first, so
    a broken engine configuration takes down at most one pool. A pool that is already down never blocks the
    other, so that a corrected spec can be rolled out to both. Missing or unready replicas alone do not block a rollout.
    """
    hashes = {
        manifest["metadata"]["labels"][COMPONENT_LABEL]: manifest["metadata"]["annotations"][TEMPLATE_HASH]
        for manifest in desired
        if TEMPLATE_HASH in manifest["metadata"].get("annotations", {})
    }
    changing = [
        pool for pool in POOLS if pool in observed and observed[pool].template_hash != hashes.get(pool)
    ]
    for pool in reversed(changing):
        (other,) = (name for name in POOLS if name != pool)
        if not (_serves(observed[pool]) and _serves(observed.get(other))):
            continue
        other_first = other in changing and POOLS.index(other) < POOLS.index(pool)
        if other_first or not _updated(observed.get(other)):
            return pool
    return None


def _serves(child: Child | None) -> bool:
    return child is not None and child.replicas is not None and child.replicas.ready > 0


def _updated(child: Child | None) -> bool:
    return child is not None and child.replicas is not None and child.replicas.updated
