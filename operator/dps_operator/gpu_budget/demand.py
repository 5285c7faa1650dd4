"""Reads the demand of the pools from the metrics of gateways."""

import asyncio
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from dps_engines.pools import POOLS, PoolName
from dps_operator.builders.gateway import ADMIN_PORT
from dps_operator.errors import DemandUnknownError
from dps_operator.gpu_budget.allocation import Demand

METRICS: Final = ("dps_in_flight", "dps_queued")
TIMEOUT_SECONDS: Final = 5.0


def demand(text: str) -> dict[PoolName, float]:
    """The requests in flight and waiting in each pool, from one gateway's /metrics."""
    found: dict[PoolName, float] = dict.fromkeys(POOLS, 0.0)
    for family in text_string_to_metric_families(text):
        if family.name in METRICS:
            for sample in family.samples:
                for pool in POOLS:
                    if sample.labels.get("pool") == pool:
                        found[pool] += sample.value
    return found


class GatewayMetrics:
    """Implements DemandReader with HTTP requests to the gateways' admin ports."""

    def __init__(self, session: aiohttp.ClientSession, port: int = ADMIN_PORT) -> None:
        self._session = session
        self._port = port

    async def read(self, addresses: list[str]) -> Demand:
        """See DemandReader."""
        if not addresses:
            raise DemandUnknownError("no gateway is running")
        parts = await asyncio.gather(*(self._one(address) for address in addresses))
        return {pool: sum(part[pool] for part in parts) for pool in POOLS}

    async def _one(self, address: str) -> dict[PoolName, float]:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._port}/metrics"
        try:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
            async with self._session.get(url, timeout=timeout) as answer:
                answer.raise_for_status()
                return demand(await answer.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            # The message is constant, because each change of it is written to the status.
            raise DemandUnknownError(
                f"port {self._port} of a gateway does not answer the operator; if spec.networkPolicy is set, add the "
                "operator's pods to networkPolicy.monitoring"
            ) from error
