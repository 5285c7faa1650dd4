"""Observes the common prefix cache of DPSRouters through their gateways."""

import asyncio
import time
from typing import Final, Protocol

from dps_operator.api.spec import Spec
from dps_operator.builders.prefix_cache import shared
from dps_operator.errors import GatewaysUnreachableError, SpecError
from dps_operator.gateway_metrics import gateway_addresses
from dps_operator.gateway_poll import specs_with
from dps_operator.observe import Key, Observations
from dps_operator.prefix_cache.health import CacheHealth, Tally, counters
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 15.0


class MetricsReader(Protocol):
    """Reads the metrics of gateways."""

    async def texts(self, addresses: list[str]) -> list[str]:
        """The metrics of each gateway, in the order of the addresses. Raises GatewaysUnreachableError."""


class CacheWatch:
    """Observes the common prefix cache of each DPSRouter that has one."""

    def __init__(self, observations: Observations, metrics: MetricsReader) -> None:
        self._observations = observations
        self._metrics = metrics
        self._tallies: dict[Key, Tally] = {}

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
            del self._tallies[key]
        before = {key: self.health(key) for key in sharing}
        await asyncio.gather(*(self._observe(key, now) for key in sharing))
        return [key for key in sharing if self.health(key) != before[key]]

    async def _observe(self, key: Key, now: float) -> None:
        tally = self._tallies.setdefault(key, Tally())
        try:
            addresses = gateway_addresses(self._observations.pods(key))
            texts = await self._metrics.texts(addresses)
        except GatewaysUnreachableError as error:
            tally.health = CacheHealth(str(error), tally.health.judged, tally.health.unserved)
        else:
            tally.add(dict(zip(addresses, map(counters, texts), strict=True)), now)


def _shares(spec: Spec) -> bool:
    """Whether the engines share a prefix cache. The reconciler reports a spec for which this cannot be determined."""
    try:
        return shared(spec) is not None
    except SpecError:
        return False
