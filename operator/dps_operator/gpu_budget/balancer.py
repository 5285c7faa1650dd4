"""Moves replicas between the pools of DPSRouters with a GPU budget, by the demand that their gateways measure."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

from dps_engines.gpu_budget import Demand, averaged
from dps_engines.pools import PoolName
from dps_operator.api.spec import Spec, parse
from dps_operator.errors import GatewaysUnreachableError, SpecError
from dps_operator.gateway_metrics import gateway_addresses
from dps_operator.gpu_budget.allocation import Allocation, current_allocation, moved
from dps_operator.observe import Key, Observations
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 5.0

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
class Balance:
    """What the balancer has decided and found, for the reconciler."""

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
        balance: Balance,
        now: Callable[[], str],
    ) -> None:
        self._observations = observations
        self._queue = queue
        self._reader = reader
        self._balance = balance
        self._now = now
        self._averages: dict[Key, Average] = {}

    async def run(self) -> None:
        """Measure and decide until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.once(time.monotonic())

    async def once(self, monotonic: float) -> None:
        """Measure and decide once for each DPSRouter. `monotonic`: the time in seconds."""
        budgets = {}
        for key, body in self._observations.routers.items():
            if "gpuBudget" in body["spec"]:
                try:
                    budgets[key] = parse(body["spec"])
                except SpecError:
                    continue  # The reconciler reports it.
        for key in set(self._averages) - set(budgets):
            del self._averages[key]
            self._balance.forget(key)
        await asyncio.gather(*(self._balance_one(key, spec, monotonic) for key, spec in budgets.items()))

    async def _balance_one(self, key: Key, spec: Spec, monotonic: float) -> None:
        try:
            sample = await self._reader.read(gateway_addresses(self._observations.pods(key)))
        except GatewaysUnreachableError as error:
            self._averages.pop(key, None)
            self._report(key, str(error))
            return
        self._report(key, "")
        average = self._averages.setdefault(key, Average(monotonic, monotonic, dict(sample)))
        assert spec.gpu_budget is not None
        cooldown = spec.gpu_budget.cooldown_seconds
        average.update(sample, monotonic, cooldown)
        body = self._observations.routers.get(key)
        if body is None or spec.paused or monotonic - average.since < cooldown:
            return
        current = self._balance.allocation(key, spec, body["status"])
        if current is None or not self._serves_as_allocated(key, current) or self._cooling(current, cooldown):
            return
        after = moved(current, average.demand, self._now())
        if after is not None:
            log.info("%s/%s: moving a replica: %s, then %s", *key, current.counts, after.counts)
            self._balance.decided[key] = after
            self._queue.add(key)

    def _report(self, key: Key, problem: str) -> None:
        if self._balance.unmeasured.get(key) != problem:
            self._balance.unmeasured[key] = problem
            self._queue.add(key)

    def _serves_as_allocated(self, key: Key, current: Allocation) -> bool:
        """Whether every replica of the allocation is ready, so that both pools serve during and after a move."""
        children = self._observations.children(key)
        for pool, count in current.counts.items():
            found = children.get(("Deployment", f"{key[1]}-{pool}"))
            if found is None or found.replicas is None:
                return False
            if not found.replicas.settled or found.replicas.desired != count:
                return False
        return True

    def _cooling(self, current: Allocation, cooldown: float) -> bool:
        if current.moved_at is None:
            return False
        passed = datetime.fromisoformat(self._now()) - datetime.fromisoformat(current.moved_at)
        return passed.total_seconds() < cooldown
