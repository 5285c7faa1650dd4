"""The operator's own scaling of pools, by the requests that gateways report.

With `spec.gpuBudget`, replicas move between the pools. Idle pools with `autoscaling.minReplicas: 0` are scaled to zero,
and back when requests arrive.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from dps_engines.gpu_budget import Demand, averaged, pool_to_grow
from dps_engines.pools import POOLS, PoolName, other_pool
from dps_operator.api import Allocation
from dps_operator.effective import Router, effective_routers, live_engines
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.metrics import MetricsReader, gateway_addresses
from dps_operator.objects import Key
from dps_operator.observe import NO_REPLICAS, Observations
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 2.0
"""Short compared with the start of an engine, so a shorter interval would not help requests that wait for one."""
UNSERVED_SECONDS: Final = 300
"""The time without a ready engine after which requests start the other pool as well. Most models load faster."""
SAMPLES: Final = {
    "dps_in_flight": "present",
    "dps_queued": "queued",
    "dps_queue_seconds_count": "served",
    "dps_pool_unavailable_total": "missed",
}
"""The gateway's samples from which each field of Activity is summed; queued requests count as present, too."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Activity:
    """The requests for one pool that one gateway reports."""

    present: float = 0.0
    """Requests in flight and waiting."""
    queued: float = 0.0
    """Requests waiting."""
    served: float = 0.0
    """Requests that the pool has served since the gateway started."""
    missed: float = 0.0
    """Requests since then that should have been served by this pool while none of its engines was ready."""


Activities = Mapping[PoolName, Activity]


def activities(text: str) -> Activities:
    """The activity of both pools, from one gateway's /metrics. Raises ValueError or LookupError."""
    sums: dict[PoolName, dict[str, float]] = {pool: {} for pool in POOLS}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for pool in POOLS:
                if sample.name in SAMPLES and sample.labels.get("pool") == pool:
                    name = SAMPLES[sample.name]
                    sums[pool][name] = sums[pool].get(name, 0.0) + sample.value
    return {
        pool: Activity(**{**found, "present": found.get("present", 0.0) + found.get("queued", 0.0)})
        for pool, found in sums.items()
    }


def demand(found: Mapping[str, Activities]) -> Demand:
    """The requests in flight and waiting in each pool, summed over gateways. found: by the address of the gateway."""
    return {pool: sum(one[pool].present for one in found.values()) for pool in POOLS}


def moved(current: Allocation, demand: Demand, now: str, load_ratio: float = 1.0) -> Allocation | None:
    """The allocation after moving one replica to the pool with the higher load; None if none should be moved.

    load_ratio: see `dps_engines.gpu_budget.pool_to_grow`.
    """
    counts = current.counts
    pool = pool_to_grow(counts, demand, load_ratio)
    if pool is None:
        return None
    counts[pool] += 1
    counts[other_pool(pool)] -= 1
    change = {"speculative_replicas": counts["speculative"], "greedy_replicas": counts["greedy"]}
    return current.model_copy(update={**change, "last_move_time": now})


def needed(
    pool: PoolName,
    now: Mapping[str, Activities],
    before: Mapping[str, Activities],
    overflowing: Collection[str],
) -> bool:
    """Whether there have been requests for the pool since the activity `before`.

    now, before: by the address of the gateway. Of a gateway that is not in `before`, only the present requests count,
    because its counters may be old. overflowing: the pools for which requests should not have to wait, because they
    serve or should. Requests that wait for one of them need the other one as well.
    """
    other = other_pool(pool)
    return any(
        found[pool].present > 0
        or (other in overflowing and found[other].queued > 0)
        or found[pool].served > before.get(address, found)[pool].served
        or found[pool].missed > before.get(address, found)[pool].missed
        for address, found in now.items()
    )


@dataclass
class _Average:
    """The exponential moving average of the demand since `since` (monotonic seconds)."""

    since: float
    updated: float
    demand: dict[PoolName, float]


@dataclass
class _Past:
    """What is known of the earlier activity of a DPSRouter whose pools may be scaled to zero."""

    last: Mapping[str, Activities]
    """The last activity that each of its gateways reported, by address."""
    needed_at: dict[PoolName, float]
    """When a pool was last needed, had no ready engine, or could not be scaled to zero (monotonic seconds)."""
    served_at: float
    """When there was last a ready engine, or both pools were scaled to zero (monotonic seconds)."""


class Autoscaler:
    """Decides about each DPSRouter with a GPU budget or with a pool that may be scaled to zero."""

    def __init__(
        self, observations: Observations, queue: WorkQueue, metrics: MetricsReader, now: Callable[[], str]
    ) -> None:
        """now: the time (RFC 3339), which is recorded for moves."""
        self._observations = observations
        self._queue = queue
        self._metrics = metrics
        self._now = now
        self._averages: dict[Key, _Average] = {}
        self._past: dict[Key, _Past] = {}

    async def run(self) -> None:
        """Read and decide until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.once(time.monotonic())

    async def once(self, monotonic: float) -> None:
        """Read and decide once for each DPSRouter. `monotonic`: the time in seconds."""
        seen = self._observations
        routers = effective_routers(seen, _is_scaled)
        budgets = {key for key, router in routers.items() if router.allocation is not None}
        zeros = {
            key for key, router in routers.items() if router.may_scale_to_zero and not router.spec.suspend
        }
        _keep(budgets, self._averages, seen.allocations)
        _keep(zeros, self._past, seen.idle)
        _keep(budgets | zeros, seen.unmeasured)
        await asyncio.gather(*(self._decide(routers[key], monotonic) for key in budgets | zeros))

    async def _decide(self, router: Router, monotonic: float) -> None:
        """Read the activity of one DPSRouter, and decide about its pools."""
        key, spec = router.key, router.spec
        try:
            addresses = gateway_addresses(self._observations.pods(key))
            found = await self._metrics.gateways(addresses, activities)
        except GatewaysUnreachableError as error:
            self._report(key, str(error))
            self._averages.pop(key, None)
            return
        self._report(key, "")
        if spec.gpu_budget is not None:
            self._balance(router, found, spec.gpu_budget.cooldown_seconds, monotonic)
        if router.may_scale_to_zero and not spec.suspend and not spec.paused:
            self._scale(router, found, monotonic)

    def _report(self, key: Key, problem: str) -> None:
        """Queue the DPSRouter if it has changed whether, or why, its gateways cannot be read."""
        if self._observations.unmeasured.get(key) != problem:
            self._observations.unmeasured[key] = problem
            self._queue.add(key)

    def _balance(
        self, router: Router, found: Mapping[str, Activities], cooldown: float, monotonic: float
    ) -> None:
        """Move a replica between the pools of a GPU budget if one should be moved."""
        key, spec, sample = router.key, router.spec, demand(found)
        average = self._averages.setdefault(key, _Average(monotonic, monotonic, dict(sample)))
        average.demand = averaged(average.demand, sample, monotonic - average.updated, cooldown)
        average.updated = monotonic
        current = router.allocation
        if current is None or spec.paused or monotonic - average.since < cooldown:
            return
        if current.last_move_time is not None:
            last = datetime.fromisoformat(current.last_move_time)
            if (datetime.fromisoformat(self._now()) - last).total_seconds() < cooldown:
                return
        # Both pools have to serve during and after a move.
        engines = live_engines(self._observations, router)
        replicas = {pool: engines[pool].replicas if pool in engines else NO_REPLICAS for pool in POOLS}
        if any(
            not replicas[pool].settled or replicas[pool].desired != current.counts[pool] for pool in POOLS
        ):
            return
        after = moved(current, average.demand, self._now(), router.load_ratio or 1.0)
        if after is not None:
            log.info("%s/%s: moving a replica: %s, then %s", *key, current.counts, after.counts)
            self._observations.allocations[key] = after
            self._queue.add(key)

    def _scale(self, router: Router, now: Mapping[str, Activities], monotonic: float) -> None:
        """Scale idle pools to zero, and needed ones from zero."""
        key = router.key
        past = self._past.setdefault(key, _Past(now, dict.fromkeys(POOLS, monotonic), monotonic))
        engines = live_engines(self._observations, router)
        ready = [name for name, engine in engines.items() if engine.replicas.ready > 0]
        if ready or len(router.scaled_to_zero) == len(POOLS):
            past.served_at = monotonic
        overflowing = ready if monotonic - past.served_at < UNSERVED_SECONDS else POOLS
        for name, pool in router.pools.items():
            if pool.idle_seconds is None:
                past.needed_at[name] = monotonic
                self._observations.idle.get(key, {}).pop(name, None)
                continue
            wanted = needed(name, now, past.last, overflowing)
            # A pool that is starting counts as needed, because it would otherwise be stopped before it has served.
            if wanted or (not pool.scaled_to_zero and name not in ready):
                past.needed_at[name] = monotonic
            idle = monotonic - past.needed_at[name] >= pool.idle_seconds
            starts = pool.scaled_to_zero and wanted
            stops = not pool.scaled_to_zero and idle
            if starts or stops:
                log.info("%s/%s: scaling the %s pool %s zero", *key, name, "from" if starts else "to")
                self._observations.idle.setdefault(key, {})[name] = stops
                self._queue.add(key)
        # A gateway that is not ready for a moment keeps its counters.
        gateways = {pod.ip for pod in self._observations.pods(key)}
        past.last = {address: last for address, last in {**past.last, **now}.items() if address in gateways}


def _keep(keys: Collection[Key], *known: dict[Key, Any]) -> None:
    """Remove the other DPSRouters from what is known."""
    for mapping in known:
        for key in mapping.keys() - keys:
            del mapping[key]


def _is_scaled(spec: Mapping[str, Any]) -> bool:
    """Whether there is a GPU budget, or a pool may be scaled to zero."""
    pools = spec.get("pools", {}).values()
    return "gpuBudget" in spec or any(pool.get("autoscaling", {}).get("minReplicas") == 0 for pool in pools)
