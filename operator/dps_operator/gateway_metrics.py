"""Requests for the metrics of a DPSRouter's gateways."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp

from dps_operator.builders.gateway_config import ADMIN_PORT
from dps_operator.errors import GatewaysUnreachableError, UnreadableMetricsError
from dps_operator.observe import Pod

TIMEOUT_SECONDS: Final = 5.0
MAX_BODY_BYTES: Final = 8 << 20
"""Largest /metrics that is parsed. That of an engine can have hundreds of kilobytes."""

Found = TypeVar("Found")


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
        return [self._parsed(address, body, parse) for address, body in zip(addresses, bodies, strict=True)]

    def _parsed(self, address: str, body: bytes, parse: Callable[[str], Found]) -> Found:
        try:
            return parsed(body, parse)
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


async def metrics_body(session: aiohttp.ClientSession, address: str, port: int) -> bytes:
    """/metrics of a pod, or its beginning if parsed() rejects it for its size.

    Raises aiohttp.ClientError or TimeoutError if the pod does not answer with status 200.
    """
    host = f"[{address}]" if ":" in address else address
    url, timeout = f"http://{host}:{port}/metrics", aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
        if answer.status != HTTPStatus.OK:
            raise aiohttp.ClientResponseError(answer.request_info, answer.history, status=answer.status)
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
        return bytes(body)


def parsed(body: bytes, parse: Callable[[str], Found]) -> Found:
    """What `parse` finds in /metrics of a pod. Raises UnreadableMetricsError.

    parse: reads Prometheus's text format; raises ValueError or LookupError if it cannot.
    """
    if len(body) > MAX_BODY_BYTES:
        raise UnreadableMetricsError(f"they are larger than {MAX_BODY_BYTES >> 20} MiB")
    try:
        return parse(body.decode())
    except (ValueError, LookupError) as error:
        raise UnreadableMetricsError("they are not as the operator expects") from error
