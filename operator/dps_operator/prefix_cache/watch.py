"""Observes the common prefix cache of DPSRouters through their gateways and engines."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from dps_engines.pools import POOLS, PoolName
from dps_operator.api.spec import Spec
from dps_operator.builders.pool_engines import runtime_of
from dps_operator.builders.prefix_cache import shared
from dps_operator.errors import GatewaysUnreachableError, SpecError
from dps_operator.gateway_metrics import gateway_addresses
from dps_operator.gateway_poll import specs_with
from dps_operator.observe import Key, Observations
from dps_operator.pod_metrics import Found
from dps_operator.prefix_cache.engines import EngineReports, EngineSample, EngineTally, engine_sample
from dps_operator.prefix_cache.health import CacheHealth, Tally, counters
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 15.0
"""Interval at which the metrics of gateways and engines are read."""


class MetricsReader(Protocol):
    """Reads the metrics of gateways."""

    async def read(self, addresses: list[str], parse: Callable[[str], Found]) -> list[Found]:
        """What `parse` finds in the metrics of each gateway, in the order of the addresses.

        Raises GatewaysUnreachableError.
        """


class EngineReader(Protocol):
    """Reads the metrics of engines."""

    async def read(
        self, addresses: Sequence[str], port: int, parse: Callable[[str], Found]
    ) -> dict[str, Found]:
        """What `parse` finds in the metrics of the engines that answer, by address."""


class CacheWatch:
    """Observes the common prefix cache of each DPSRouter that has one."""

    def __init__(self, observations: Observations, gateways: MetricsReader, engines: EngineReader) -> None:
        self._observations = observations
        self._gateways = gateways
        self._engines = engines
        self._tallies: dict[Key, Tally] = {}
        self._engine_tallies: dict[Key, EngineTally] = {}

    def health(self, key: Key) -> CacheHealth | None:
        """What is known of a DPSRouter's common prefix cache; None if nothing has been observed."""
        tally = self._tallies.get(key)
        return tally.health if tally else None

    async def run(self, queue: WorkQueue) -> None:
        """Observe until cancelled. A DPSRouter is queued for reconciling when the result changes."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for key in await self.once(time.monotonic()):
                queue.add(key)

    async def once(self, now: float) -> list[Key]:
        """Observe every DPSRouter once, at a time in seconds. Returns those for which the result has changed."""
        specs = specs_with(self._observations, lambda spec: "prefixCache" in spec)
        sharing = [key for key, spec in specs.items() if _shares(spec)]
        for key in set(self._tallies) - set(sharing):
            del self._tallies[key], self._engine_tallies[key]
        before = {key: self.health(key) for key in sharing}
        await asyncio.gather(*(self._observe(key, specs[key], now) for key in sharing))
        return [key for key in sharing if self.health(key) != before[key]]

    async def _observe(self, key: Key, spec: Spec, now: float) -> None:
        tally = self._tallies.setdefault(key, Tally())
        try:
            addresses = gateway_addresses(self._observations.pods(key))
            found = await self._gateways.read(addresses, counters)
        except GatewaysUnreachableError as error:
            tally.health = replace(tally.health, unreachable=str(error))
        else:
            tally.add(dict(zip(addresses, found, strict=True)), now)
        tally.health = replace(tally.health, reports=await self._reports(key, spec, now))

    async def _reports(self, key: Key, spec: Spec, now: float) -> EngineReports:
        tally = self._engine_tallies.setdefault(key, EngineTally())
        tally.add({pool: await self._samples(key, spec, pool) for pool in POOLS}, now)
        return tally.reports

    async def _samples(self, key: Key, spec: Spec, pool: PoolName) -> dict[str, EngineSample]:
        addresses = [
            pod.ip
            for pod in self._observations.pods(key)
            if pod.component == pool and pod.ip and not pod.terminating
        ]
        return await self._engines.read(addresses, runtime_of(spec, pool).port, engine_sample)


def _shares(spec: Spec) -> bool:
    """Whether the engines share a prefix cache. The reconciler reports a spec for which this cannot be determined."""
    try:
        return shared(spec) is not None
    except SpecError:
        return False
