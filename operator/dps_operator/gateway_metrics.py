"""Requests for the metrics of a DPSRouter's gateways."""

import asyncio
from collections.abc import Callable

import aiohttp

from dps_operator.builders.gateway_config import ADMIN_PORT
from dps_operator.errors import GatewaysUnreachableError, UnreadableMetricsError
from dps_operator.observe import Pod
from dps_operator.pod_metrics import Found, metrics_body, parsed


def gateway_addresses(pods: list[Pod]) -> list[str]:
    """The addresses of the gateways among a DPSRouter's pods that are ready, and so serve requests."""
    return [
        pod.ip for pod in pods if pod.component == "gateway" and pod.ip and pod.ready and not pod.terminating
    ]


class GatewayMetrics:
    """Reads /metrics on the gateways' admin ports."""

    def __init__(self, session: aiohttp.ClientSession, port: int = ADMIN_PORT) -> None:
        self._session = session
        self._port = port

    async def read(self, addresses: list[str], parse: Callable[[str], Found]) -> list[Found]:
        """What `parse` finds in the metrics of each gateway. Raises GatewaysUnreachableError.

        parse: as in parsed().
        """
        if not addresses:
            raise GatewaysUnreachableError("no gateway is ready")
        bodies = await asyncio.gather(*(self._body(address) for address in addresses))
        # If several are unreadable, the message always names the first, because each change is written to the status.
        return [
            await self._parsed(address, body, parse) for address, body in zip(addresses, bodies, strict=True)
        ]

    async def _parsed(self, address: str, body: bytes, parse: Callable[[str], Found]) -> Found:
        try:
            return await parsed(body, parse)
        except UnreadableMetricsError as error:
            raise GatewaysUnreachableError(
                f"the metrics of the gateway at {address} cannot be read: {error}"
            ) from error

    async def _body(self, address: str) -> bytes:
        try:
            return await metrics_body(self._session, address, self._port)
        except (aiohttp.ClientError, TimeoutError) as error:
            # The message is constant, because each change of it is written to the status.
            raise GatewaysUnreachableError(
                f"port {self._port} of a gateway does not answer the operator; if spec.networkPolicy is set, add the "
                "operator's pods to networkPolicy.monitoring"
            ) from error
