"""Scales idle pools to zero, and back when the gateways report requests for them."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dps_engines.pools import POOLS, PoolName
from dps_operator.api.spec import Spec, parse
from dps_operator.errors import GatewaysUnreachableError, SpecError
from dps_operator.gateway_metrics import GatewayMetrics, gateway_addresses
from dps_operator.observe import Child, Key, Observations
from dps_operator.scale_to_zero.rules import Activities, activities, idle_seconds, needed, pools_with_zero
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 2.0
"""An engine takes longer to start, so that a shorter interval would make no difference to requests that wait."""

log = logging.getLogger(__name__)


class ActivityReader(Protocol):
    """Reads the activity of the pools from gateways."""

    async def read(self, addresses: list[str]) -> Activities:
        """The activity of both pools, summed over gateways. Raises GatewaysUnreachableError."""


class GatewayActivity:
    """Implements ActivityReader with the metrics of the gateways."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def read(self, addresses: list[str]) -> Activities:
        """See ActivityReader."""
        return activities(await self._metrics.texts(addresses))


@dataclass
class Sleep:
    """Which pools are scaled to zero, for the reconciler."""

    decided: dict[Key, dict[PoolName, bool]] = field(default_factory=dict)
    """Whether a pool is scaled to zero, as far as this operator has decided about it."""
    unmeasured: dict[Key, str] = field(default_factory=dict)
    """Why the activity is unknown; empty if it is known."""

    def asleep(self, key: Key, spec: Spec, engines: Mapping[str, Child]) -> list[PoolName]:
        """The pools that are scaled to zero. engines: the live Deployments by pool, which a new operator continues."""
        decided = self.decided.get(key, {})
        return [pool for pool in pools_with_zero(spec) if decided.get(pool, _has_none(engines.get(pool)))]

    def forget(self, key: Key) -> None:
        """Remove a DPSRouter that was deleted or suspended, or none of whose pools may be scaled to zero."""
        self.decided.pop(key, None)
        self.unmeasured.pop(key, None)


@dataclass
class _Past:
    """What is known of the earlier activity of a DPSRouter."""

    last: Activities
    needed_at: dict[PoolName, float]
    """When a pool was last needed, or had no ready engine (monotonic seconds)."""


class Scaler:
    """Reads the activity of each DPSRouter with a pool that may be scaled to zero, and decides."""

    def __init__(
        self, observations: Observations, queue: WorkQueue, reader: ActivityReader, sleep: Sleep
    ) -> None:
        self._observations = observations
        self._queue = queue
        self._reader = reader
        self._sleep = sleep
        self._past: dict[Key, _Past] = {}

    async def run(self) -> None:
        """Read and decide until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.once(time.monotonic())

    async def once(self, monotonic: float) -> None:
        """Read and decide once for each DPSRouter. `monotonic`: the time in seconds."""
        specs = {}
        for key, body in self._observations.routers.items():
            if _mentions_zero(body["spec"]):
                try:
                    spec = parse(body["spec"])
                except SpecError:
                    continue  # The reconciler reports it.
                if not spec.suspend:
                    specs[key] = spec
        for key in (set(self._past) | set(self._sleep.decided)) - set(specs):
            self._past.pop(key, None)
            self._sleep.forget(key)
        await asyncio.gather(*(self._scale(key, spec, monotonic) for key, spec in specs.items()))

    async def _scale(self, key: Key, spec: Spec, monotonic: float) -> None:
        try:
            now = await self._reader.read(gateway_addresses(self._observations.pods(key)))
        except GatewaysUnreachableError as error:
            self._report(key, str(error))
            return
        self._report(key, "")
        if spec.paused:
            return
        past = self._past.setdefault(key, _Past(now, dict.fromkeys(POOLS, monotonic)))
        children = self._observations.children(key)
        engines: dict[str, Child] = {
            pool: children[name] for pool in POOLS if (name := _deployment(key, pool)) in children
        }
        serving = [pool for pool, engine in engines.items() if engine.replicas and engine.replicas.ready > 0]
        asleep = self._sleep.asleep(key, spec, engines)
        for pool in pools_with_zero(spec):
            wanted = needed(pool, now, past.last, serving)
            # A pool that is starting is not idle, so that no start is in vain.
            if wanted or (pool not in asleep and pool not in serving):
                past.needed_at[pool] = monotonic
            seconds = idle_seconds(spec, pool)
            assert seconds is not None
            idle = monotonic - past.needed_at[pool] >= seconds
            if wanted if pool in asleep else idle:
                log.info("%s/%s: scaling the %s pool %s zero", *key, pool, "from" if wanted else "to")
                self._sleep.decided.setdefault(key, {})[pool] = not wanted
                self._queue.add(key)
        past.last = now

    def _report(self, key: Key, problem: str) -> None:
        if self._sleep.unmeasured.get(key) != problem:
            self._sleep.unmeasured[key] = problem
            self._queue.add(key)


def _mentions_zero(spec: Mapping[str, Any]) -> bool:
    """Whether a pool may be scaled to zero, which is found without parsing the spec of every DPSRouter."""
    pools = spec.get("pools", {}).values()
    return any(pool.get("autoscaling", {}).get("minReplicas") == 0 for pool in pools)


def _deployment(key: Key, pool: PoolName) -> tuple[str, str]:
    return "Deployment", f"{key[1]}-{pool}"


def _has_none(engine: Child | None) -> bool:
    """Whether the pool's Deployment exists and has no replicas."""
    return engine is not None and engine.replicas is not None and engine.replicas.desired == 0
