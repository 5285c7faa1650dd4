"""Moves replicas between the pools of DPSRouters with a GPU budget, by the demand that their gateways measure."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

from dps_engines.gpu_budget import Demand, averaged
from dps_engines.pools import PoolName
from dps_operator.api.spec import Spec
from dps_operator.gateway_poll import GatewayPoll, at_intervals, specs_with
from dps_operator.gpu_budget.allocation import Allocation, calibrated_ratio, current_allocation, moved
from dps_operator.observe import Key, Observations
from dps_operator.resources import engine_key
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 5.0
"""Interval at which the demand is read from the gateways."""

log = logging.getLogger(__name__)


class DemandReader(Protocol):
    """Reads the demand from gateways."""

    async def read(self, addresses: list[str]) -> Demand:
        """Requests in flight and waiting in each pool, summed over gateways. Raises GatewaysUnreachableError."""


@dataclass
class Average:
    """The exponential moving average of the demand since `since` (monotonic seconds)."""

    since: float
    updated: float
    demand: dict[PoolName, float]

    def update(self, sample: Demand, now: float, cooldown_seconds: float) -> None:
        """Include a sample."""
        self.demand = averaged(self.demand, sample, now - self.updated, cooldown_seconds)
        self.updated = now


@dataclass
class Allocations:
    """The balancer's decisions about each DPSRouter with a GPU budget, which the reconciler applies."""

    decided: dict[Key, Allocation] = field(default_factory=dict)
    """Allocations that are newer than those in the status."""
    unmeasured: dict[Key, str] = field(default_factory=dict)
    """Why the demand is unknown; empty if it is known."""

    def allocation(self, key: Key, spec: Spec, status: Mapping[str, Any]) -> Allocation | None:
        """The allocation of the budget in `spec`; None without one."""
        newer = self.decided.get(key)
        return current_allocation(spec, {"gpuBudget": newer.to_status()} if newer else status)

    def forget(self, key: Key) -> None:
        """Remove a DPSRouter that was deleted, or that no longer has a budget."""
        self.decided.pop(key, None)
        self.unmeasured.pop(key, None)


class Balancer:
    """Measures the demand of each DPSRouter with a GPU budget, and decides about moves."""

    def __init__(
        self,
        observations: Observations,
        queue: WorkQueue,
        reader: DemandReader,
        allocations: Allocations,
        now: Callable[[], str],
    ) -> None:
        self._observations = observations
        self._queue = queue
        self._gateways = GatewayPoll(observations, queue, reader.read, allocations.unmeasured)
        self._allocations = allocations
        self._now = now
        self._averages: dict[Key, Average] = {}

    async def run(self) -> None:
        """Measure and decide until cancelled."""
        await at_intervals(POLL_SECONDS, self.once)

    async def once(self, monotonic: float) -> None:
        """Measure and decide once for each DPSRouter. `monotonic`: the time in seconds."""
        specs = specs_with(self._observations, lambda spec: "gpuBudget" in spec)
        known = set(self._averages) | set(self._allocations.decided) | set(self._allocations.unmeasured)
        for key in known - set(specs):
            self._averages.pop(key, None)
            self._allocations.forget(key)
        await asyncio.gather(*(self._balance(key, spec, monotonic) for key, spec in specs.items()))

    async def _balance(self, key: Key, spec: Spec, monotonic: float) -> None:
        """Measure the demand of one DPSRouter, and move a replica if one should be moved."""
        sample = await self._gateways.sample(key)
        if sample is None:
            self._averages.pop(key, None)
            return
        average = self._averages.setdefault(key, Average(monotonic, monotonic, dict(sample)))
        assert spec.gpu_budget is not None
        cooldown = spec.gpu_budget.cooldown_seconds
        average.update(sample, monotonic, cooldown)
        body = self._observations.routers.get(key)
        if body is None or spec.paused or monotonic - average.since < cooldown:
            return
        current = self._allocations.allocation(key, spec, body["status"])
        if current is None or not self._serves_as_allocated(key, current) or self._cooling(current, cooldown):
            return
        ratio = calibrated_ratio(spec, body["status"]) or 1.0
        after = moved(current, average.demand, self._now(), ratio)
        if after is not None:
            log.info("%s/%s: moving a replica: %s, then %s", *key, current.counts, after.counts)
            self._allocations.decided[key] = after
            self._queue.add(key)

    def _serves_as_allocated(self, key: Key, current: Allocation) -> bool:
        """Whether every replica of the allocation is ready, so that both pools serve during and after a move."""
        children = self._observations.children(key)
        for pool, count in current.counts.items():
            found = children.get(engine_key(key[1], pool))
            if found is None or found.replicas is None:
                return False
            if not found.replicas.settled or found.replicas.desired != count:
                return False
        return True

    def _cooling(self, current: Allocation, cooldown: float) -> bool:
        """Whether the last move was less than `cooldown` seconds ago."""
        if current.moved_at is None:
            return False
        passed = datetime.fromisoformat(self._now()) - datetime.fromisoformat(current.moved_at)
        return passed.total_seconds() < cooldown
