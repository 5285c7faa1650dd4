"""Reads the demand of the pools from the metrics of gateways."""

from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from dps_engines.gpu_budget import Demand
from dps_engines.pools import POOLS, PoolName
from dps_operator.gateway_metrics import GatewayMetrics

METRICS: Final = ("dps_in_flight", "dps_queued")


def demand(text: str) -> dict[PoolName, float]:
    """The requests in flight and waiting in each pool, from one gateway's /metrics.

    Raises ValueError or LookupError.
    """
    found: dict[PoolName, float] = dict.fromkeys(POOLS, 0.0)
    for family in text_string_to_metric_families(text):
        if family.name in METRICS:
            for sample in family.samples:
                for pool in POOLS:
                    if sample.labels.get("pool") == pool:
                        found[pool] += sample.value
    return found


class GatewayDemand:
    """Implements DemandReader with the metrics of the gateways."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def read(self, addresses: list[str]) -> Demand:
        """See DemandReader."""
        parts = await self._metrics.read(addresses, demand)
        return {pool: sum(part[pool] for part in parts) for pool in POOLS}
