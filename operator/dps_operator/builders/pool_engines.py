"""The engine runtime, image and version of each pool, and the time that its engines may take to load."""

from typing import Any

from dps_engines.pools import PoolName
from dps_engines.registry import RUNTIMES
from dps_engines.runtime import EngineRuntime
from dps_operator.api.model import Engine
from dps_operator.api.pools import PoolSpec
from dps_operator.api.spec import Spec

STARTUP_PROBE_PERIOD = 10
"""Seconds between two probes of an engine that is loading its model, unless podTemplate sets another period."""


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


def load_seconds(spec: Spec, name: PoolName) -> int:
    """Seconds that an engine of one pool may take to load: the runtime's, unless podTemplate has other numbers."""
    containers = (pool_of(spec, name).pod_template.spec or {}).get("containers") or []
    engine: dict[str, Any] = next((one for one in containers if one.get("name") == "engine"), {})
    probe, usual = engine.get("startupProbe") or {}, runtime_of(spec, name).load_seconds
    period = probe.get("periodSeconds", STARTUP_PROBE_PERIOD)
    failures = probe.get("failureThreshold", usual // STARTUP_PROBE_PERIOD)
    # The API server refuses other values.
    return period * failures if isinstance(period, int) and isinstance(failures, int) else usual


def version_of(spec: Spec, name: PoolName) -> str:
    """The version of one pool's engines."""
    engine = engine_of(spec, name)
    return RUNTIMES[engine.runtime].version(engine.image, engine.version)
