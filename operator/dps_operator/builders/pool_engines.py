"""The engine runtime, image and version of each pool."""

from dps_engines.pools import PoolName
from dps_engines.registry import RUNTIMES
from dps_engines.runtime import EngineRuntime
from dps_operator.api.model import Engine
from dps_operator.api.pools import PoolSpec
from dps_operator.api.spec import Spec


def pool_of(spec: Spec, name: PoolName) -> PoolSpec:
    """The spec of one pool."""
    return spec.pools.speculative if name == "speculative" else spec.pools.greedy


def has_own_engine(pool: PoolSpec) -> bool:
    """Whether a pool has another runtime, image or version than `spec.engine`."""
    return any(value is not None for value in (pool.runtime, pool.image, pool.version))


def engine_of(spec: Spec, name: PoolName) -> Engine:
    """The engine of one pool: `spec.engine` with the pool's own runtime, image and version, if it has any."""
    pool, engine = pool_of(spec, name), spec.engine
    if not has_own_engine(pool):
        return engine
    own = {"runtime": pool.runtime or engine.runtime, "image": pool.image, "version": pool.version}
    return engine.model_copy(update=own)


def runtime_of(spec: Spec, name: PoolName) -> EngineRuntime:
    """The runtime of one pool."""
    return RUNTIMES[engine_of(spec, name).runtime]


def version_of(spec: Spec, name: PoolName) -> str:
    """The version of one pool's engines."""
    engine = engine_of(spec, name)
    return RUNTIMES[engine.runtime].version(engine.image, engine.version)
