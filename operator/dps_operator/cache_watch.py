"""Observes the common prefix cache of DPSRouters through their gateways and engines."""

import asyncio
import time
from dataclasses import replace
from typing import Final

from dps_engines.pools import POOLS, PoolName
from dps_operator.cache_health import CacheHealth, EngineSample, Tally, counters, engine_sample
from dps_operator.effective import Router, effective_routers
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.metrics import MetricsReader, gateway_addresses
from dps_operator.objects import Key
from dps_operator.observe import Observations
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 15.0
"""Interval at which the metrics of gateways and engines are read."""


class CacheWatch:
    """Observes the common prefix cache of each DPSRouter that has one."""

    def __init__(self, observations: Observations, metrics: MetricsReader) -> None:
        self._observations = observations
        self._metrics = metrics
        self._tallies: dict[Key, Tally] = {}

    async def run(self, queue: WorkQueue) -> None:
        """Observe until cancelled. A DPSRouter is queued for reconciling when the result changes."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for key in await self.once(time.monotonic()):
                queue.add(key)

    async def once(self, now: float) -> list[Key]:
        """Observe every DPSRouter once, at a time in seconds. Returns those for which the result has changed."""
        routers = effective_routers(self._observations, lambda spec: "prefixCache" in spec)
        sharing = {key: router for key, router in routers.items() if router.shared_cache is not None}
        self._tallies = {key: self._tallies.get(key, Tally()) for key in sharing}
        await asyncio.gather(*(self._observe(router, now) for router in sharing.values()))
        found = {key: tally.health for key, tally in self._tallies.items()}
        before, self._observations.cache_health = self._observations.cache_health, found
        return [key for key, health in found.items() if health != before.get(key, CacheHealth())]

    async def _observe(self, router: Router, now: float) -> None:
        key = router.key
        tally = self._tallies[key]
        try:
            addresses = gateway_addresses(self._observations.pods(key))
            tally.add_gateways(await self._metrics.gateways(addresses, counters), now)
        except GatewaysUnreachableError as error:
            tally.health = replace(tally.health, unreachable=str(error))
        tally.add_engines({pool: await self._samples(router, pool) for pool in POOLS}, now)

    async def _samples(self, router: Router, pool: PoolName) -> dict[str, EngineSample]:
        addresses = [
            pod.ip
            for pod in self._observations.pods(router.key)
            if pod.component == pool and pod.ip and not pod.terminating
        ]
        return await self._metrics.engines(addresses, router.pools[pool].runtime.port, engine_sample)
