"""Scales idle pools to zero, and back when the gateways report requests for them."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dps_engines.pools import POOLS, PoolName
from dps_operator.api.spec import Spec
from dps_operator.gateway_metrics import GatewayMetrics
from dps_operator.gateway_poll import GatewayPoll, at_intervals, specs_with
from dps_operator.observe import Child, Key, Observations
from dps_operator.resources import engine_key
from dps_operator.scale_to_zero.rules import (
    UNSERVED_SECONDS,
    Activities,
    activities,
    idle_seconds,
    needed,
    pools_with_zero,
)
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 2.0
"""Short compared with the start of an engine, so a shorter interval would not help requests that wait for one."""

log = logging.getLogger(__name__)


class ActivityReader(Protocol):
    """Reads the activity of the pools from gateways."""

    async def read(self, addresses: list[str]) -> Mapping[str, Activities]:
        """The activity of both pools, by the address of the gateway. Raises GatewaysUnreachableError."""


class GatewayActivity:
    """Implements ActivityReader with the metrics of the gateways."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def read(self, addresses: list[str]) -> Mapping[str, Activities]:
        """See ActivityReader."""
        return dict(zip(addresses, await self._metrics.read(addresses, activities), strict=True))


@dataclass
class IdlePools:
    """The scaler's decisions about idle pools, which the reconciler applies."""

    decided: dict[Key, dict[PoolName, bool]] = field(default_factory=dict)
    """Whether a pool is scaled to zero, for the pools about which this operator process has decided."""
    unmeasured: dict[Key, str] = field(default_factory=dict)
    """Why the activity is unknown; empty if it is known."""

    def scaled_to_zero(self, key: Key, spec: Spec, engines: Mapping[str, Child]) -> list[PoolName]:
        """The pools that are scaled to zero.

        engines: the live Deployments by pool. A pool for which nothing has been decided yet keeps its replicas, so
        that a restart of the operator does not change them.
        """
        decided = self.decided.get(key, {})
        return [
            pool for pool in pools_with_zero(spec) if decided.get(pool, _has_no_replicas(engines.get(pool)))
        ]

    def forget(self, key: Key) -> None:
        """Remove a DPSRouter that was deleted or suspended, or none of whose pools may be scaled to zero."""
        self.decided.pop(key, None)
        self.unmeasured.pop(key, None)


@dataclass
class _Past:
    """What is known of the earlier activity of a DPSRouter."""

    last: Mapping[str, Activities]
    """The last activity that each of its gateways reported, by address."""
    needed_at: dict[PoolName, float]
    """When a pool was last needed, had no ready engine, or could not be scaled to zero (monotonic seconds)."""
    served_at: float
    """When there was last a ready engine, or both pools were scaled to zero (monotonic seconds)."""


class Scaler:
    """Reads the activity of each DPSRouter with a pool that may be scaled to zero, and decides."""

    def __init__(
        self, observations: Observations, queue: WorkQueue, reader: ActivityReader, idle_pools: IdlePools
    ) -> None:
        self._observations = observations
        self._queue = queue
        self._gateways = GatewayPoll(observations, queue, reader.read, idle_pools.unmeasured)
        self._idle_pools = idle_pools
        self._past: dict[Key, _Past] = {}

    async def run(self) -> None:
        """Read and decide until cancelled."""
        await at_intervals(POLL_SECONDS, self.once)

    async def once(self, monotonic: float) -> None:
        """Read and decide once for each DPSRouter. `monotonic`: the time in seconds."""
        specs = {
            key: spec
            for key, spec in specs_with(self._observations, _mentions_zero).items()
            if not spec.suspend
        }
        for key in (set(self._past) | set(self._idle_pools.decided)) - set(specs):
            self._past.pop(key, None)
            self._idle_pools.forget(key)
        await asyncio.gather(*(self._scale(key, spec, monotonic) for key, spec in specs.items()))

    async def _scale(self, key: Key, spec: Spec, monotonic: float) -> None:
        """Read the activity of one DPSRouter, and decide about its pools."""
        now = await self._gateways.sample(key)
        if now is None or spec.paused:
            return
        past = self._past.setdefault(key, _Past(now, dict.fromkeys(POOLS, monotonic), monotonic))
        children = self._observations.children(key)
        engines: dict[str, Child] = {
            pool: children[name] for pool in POOLS if (name := engine_key(key[1], pool)) in children
        }
        ready = [pool for pool, engine in engines.items() if engine.replicas and engine.replicas.ready > 0]
        scaled_to_zero = self._idle_pools.scaled_to_zero(key, spec, engines)
        if ready or len(scaled_to_zero) == len(POOLS):
            past.served_at = monotonic
        overflowing = ready if monotonic - past.served_at < UNSERVED_SECONDS else POOLS
        for pool in POOLS:
            seconds = idle_seconds(spec, pool)
            if seconds is None:
                past.needed_at[pool] = monotonic
                self._idle_pools.decided.get(key, {}).pop(pool, None)
                continue
            wanted = needed(pool, now, past.last, overflowing)
            # A pool that is starting counts as needed, because it would otherwise be stopped before it has served.
            if wanted or (pool not in scaled_to_zero and pool not in ready):
                past.needed_at[pool] = monotonic
            idle = monotonic - past.needed_at[pool] >= seconds
            starts = pool in scaled_to_zero and wanted
            stops = pool not in scaled_to_zero and idle
            if starts or stops:
                log.info("%s/%s: scaling the %s pool %s zero", *key, pool, "from" if starts else "to")
                self._idle_pools.decided.setdefault(key, {})[pool] = stops
                self._queue.add(key)
        # A gateway that is not ready for a moment keeps its counters.
        gateways = {pod.ip for pod in self._observations.pods(key)}
        past.last = {address: last for address, last in {**past.last, **now}.items() if address in gateways}


def _mentions_zero(spec: Mapping[str, Any]) -> bool:
    """Whether a pool may be scaled to zero."""
    pools = spec.get("pools", {}).values()
    return any(pool.get("autoscaling", {}).get("minReplicas") == 0 for pool in pools)


def _has_no_replicas(engine: Child | None) -> bool:
    """Whether the pool's Deployment exists and has no replicas."""
    return engine is not None and engine.replicas is not None and engine.replicas.desired == 0
