"""Replicas that move between the pools of a simulated fleet, by the operator's rule. This module performs no I/O."""

from typing import Final

from dps_engines.gpu_budget import averaged, pool_to_grow
from dps_engines.pools import POOLS, PoolName
from dps_gateway.pool import Pool
from dps_lab.simulate.engine import VirtualEngine
from dps_lab.simulate.fleet import Budget, FleetSpec, additional_engine, share
from dps_lab.simulate.gateway import VirtualGateway

INTERVAL_SECONDS: Final = 5.0
"""The operator's interval between two measurements of the demand."""


class Balancer:
    """Decides about moves, and carries them out. The caller advances the time."""

    def __init__(self, fleet: FleetSpec, budget: Budget, gateway: VirtualGateway) -> None:
        self._fleet = fleet
        self._budget = budget
        self._gateway = gateway
        self._number = sum(fleet.engines.values())
        self._average: dict[PoolName, float] = dict.fromkeys(POOLS, 0.0)
        self._moved_at = 0.0
        self._stopping: VirtualEngine | None = None
        self._starting: VirtualEngine | None = None
        self._starts_at = 0.0

    def measure(self, now: float) -> VirtualEngine | None:
        """Measure the demand, continue a move or decide on one. Returns an engine that begins to serve."""
        sample = {pool: float(self._gateway.demand[Pool(pool)]) for pool in POOLS}
        self._average = averaged(self._average, sample, INTERVAL_SECONDS, self._budget.cooldown_seconds)
        if self._starting is not None:
            return self._finish(self._starting) if now >= self._starts_at else None
        if self._stopping is not None:
            load = self._stopping.load
            if not load.running and not load.waiting:
                self._number += 1
                self._starting = additional_engine(self._fleet, self._stopping.pool.other, self._number)
                self._starts_at = now + self._budget.start_seconds
            return None
        if now - self._moved_at >= self._budget.cooldown_seconds:
            self._decide(now)
        return None

    def _decide(self, now: float) -> None:
        engines = self._gateway.engines
        counts = {pool: sum(engine.pool == pool for engine in engines) for pool in POOLS}
        chosen = pool_to_grow(counts, self._average, self._budget.load_ratio)
        if chosen is not None:
            donors = [engine for engine in engines if engine.pool is Pool(chosen).other]
            self._stopping = min(donors, key=lambda engine: engine.load.running)
            self._moved_at = now
            self._gateway.remove(self._stopping)

    def _finish(self, engine: VirtualEngine) -> VirtualEngine:
        self._gateway.add(engine)
        self._stopping = self._starting = None
        if self._fleet.cache == "common":
            share(self._fleet, self._gateway.engines)
        return engine
