"""Requests for the metrics of a DPSRouter's gateways."""

import asyncio
from typing import Final

import aiohttp

from dps_operator.builders.gateway_config import ADMIN_PORT
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.observe import Pod

TIMEOUT_SECONDS: Final = 5.0


def gateway_addresses(pods: list[Pod]) -> list[str]:
    """The addresses of the running gateways among a DPSRouter's pods."""
    return [pod.ip for pod in pods if pod.component == "gateway" and pod.ip and not pod.terminating]


class GatewayMetrics:
    """Reads /metrics on the gateways' admin ports."""

    def __init__(self, session: aiohttp.ClientSession, port: int = ADMIN_PORT) -> None:
        self._session = session
        self._port = port

    async def texts(self, addresses: list[str]) -> list[str]:
        """The metrics of each gateway, in Prometheus's text format. Raises GatewaysUnreachableError."""
        if not addresses:
            raise GatewaysUnreachableError("no gateway is running")
        return await asyncio.gather(*(self._one(address) for address in addresses))

    async def _one(self, address: str) -> str:
        try:
            return await metrics_text(self._session, address, self._port)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            # The message is constant, because each change of it is written to the status.
            raise GatewaysUnreachableError(
                f"port {self._port} of a gateway does not answer the operator; if spec.networkPolicy is set, add the "
                "operator's pods to networkPolicy.monitoring"
            ) from error


async def metrics_text(session: aiohttp.ClientSession, address: str, port: int) -> str:
    """/metrics of a pod. Raises aiohttp.ClientError, TimeoutError or ValueError if it cannot be read."""
    host = f"[{address}]" if ":" in address else address
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with session.get(f"http://{host}:{port}/metrics", timeout=timeout) as answer:
        answer.raise_for_status()
        return await answer.text()
