"""The revision of the engines that a pool keeps when the operator is upgraded. This module performs no I/O."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dps_engines.pools import POOLS, PoolName
from dps_engines.registry import RUNTIMES
from dps_operator.api.model import Engine
from dps_operator.api.pools import PoolSpec
from dps_operator.api.spec import Spec
from dps_operator.api.status import REVISIONS
from dps_operator.builders.pool_engines import engine_of, has_own_engine, pool_of
from dps_operator.observe import Child
from dps_operator.resources import COMPONENT_LABEL, SPEC_HASH, TEMPLATE_HASH, Manifest


def with_version(spec: Spec, observed: Mapping[str, Child]) -> Spec:
    """The spec with the version of each engine that has neither a version nor an image.

    The version is that of the engine Deployments in `observed`, by pool, or the default if there are none or if
    upgrades are automatic.
    """
    common = [pool for pool in POOLS if not has_own_engine(pool_of(spec, pool))]
    engine = _with_version(spec.engine, [observed[pool] for pool in common if pool in observed])
    pools: dict[str, PoolSpec] = {}
    for pool in POOLS:
        if pool not in common:
            own = _with_version(engine_of(spec, pool), [observed[pool]] if pool in observed else [])
            pools[pool] = pool_of(spec, pool).model_copy(update={"version": own.version})
    return spec.model_copy(update={"engine": engine, "pools": spec.pools.model_copy(update=pools)})


def _with_version(engine: Engine, deployments: Sequence[Child]) -> Engine:
    """The engine with a version, if it has neither a version nor an image. deployments: those that run it."""
    if engine.version is not None or engine.image is not None:
        return engine
    recorded = [deployment.engine.split() for deployment in deployments]
    in_use = [words[1] for words in recorded if len(words) == 2 and words[0] == engine.runtime]
    keep = in_use and engine.upgrade_policy == "Manual"
    version = in_use[0] if keep else RUNTIMES[engine.runtime].version(None, None)
    return engine.model_copy(update={"version": version})


def kept_pools(spec: Spec, desired: Sequence[Manifest], observed: Mapping[str, Child]) -> list[PoolName]:
    """The pools that keep their pod template although the operator generates another one for the same spec.

    A pool without ready replicas keeps nothing, because a change interrupts no request and may repair it.
    """
    if spec.engine.upgrade_policy == "Automatic":
        return []
    annotations: dict[str, Mapping[str, str]] = {
        manifest["metadata"]["labels"][COMPONENT_LABEL]: manifest["metadata"]["annotations"]
        for manifest in desired
        if SPEC_HASH in manifest["metadata"].get("annotations", {})
    }
    return [
        pool
        for pool in POOLS
        if pool in observed
        and (replicas := observed[pool].replicas) is not None
        and replicas.ready > 0
        and observed[pool].spec_hash == annotations[pool][SPEC_HASH]
        and observed[pool].template_hash != annotations[pool][TEMPLATE_HASH]
    ]


def history(
    engine: Child | None, before: Sequence[Mapping[str, Any]], generation: int, now: str
) -> list[Mapping[str, Any]]:
    """A pool's revisions, newest first. before: the previous list. now: the time in RFC 3339."""
    if engine is None or not engine.template_hash or _is_newest(engine, before):
        return list(before)
    newest = {
        "revision": engine.template_hash,
        "engine": engine.engine,
        "image": engine.image,
        "generation": generation,
        "time": now,
    }
    return [newest, *before][:REVISIONS]


def _is_newest(engine: Child, before: Sequence[Mapping[str, Any]]) -> bool:
    return bool(before) and before[0]["revision"] == engine.template_hash


def kept_suffix(pools: Collection[PoolName]) -> str:
    """The end of a condition's message that names the pools which keep their pod template; empty if none does."""
    if not pools:
        return ""
    subject = "both pools keep" if len(pools) > 1 else f"the {next(iter(pools))} pool keeps"
    return f"; {subject} the pod template of another operator release (spec.engine.upgradePolicy)"
