"""Requests for the metrics of gateways and engines."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp

from dps_operator.build.gateway import ADMIN_PORT
from dps_operator.errors import GatewaysUnreachableError, UnreadableMetricsError
from dps_operator.observe import Pod

TIMEOUT_SECONDS: Final = 5.0
MAX_BODY_BYTES: Final = 8 << 20
"""Largest /metrics that is parsed. That of an engine can have hundreds of kilobytes."""
LARGE_BODY_BYTES: Final = 64 << 10
"""Above this size, parsing would occupy the event loop for a noticeable time: a megabyte takes about a second."""
ENGINES_AT_ONCE: Final = 8
"""Engines whose metrics are requested at the same time, because an answer can have hundreds of kilobytes."""

Found = TypeVar("Found")

log = logging.getLogger(__name__)


def gateway_addresses(pods: list[Pod]) -> list[str]:
    """The addresses of the gateways among a DPSRouter's pods that are ready, and so serve requests."""
    return [
        pod.ip for pod in pods if pod.component == "gateway" and pod.ip and pod.ready and not pod.terminating
    ]


class MetricsReader:
    """Reads the metrics of gateways and engines. gateway_port: the admin port of gateways.

    `parse` reads Prometheus's text format; it raises ValueError or LookupError if it cannot.
    """

    def __init__(self, session: aiohttp.ClientSession, gateway_port: int = ADMIN_PORT) -> None:
        self._session = session
        self._port = gateway_port
        self._places = asyncio.Semaphore(ENGINES_AT_ONCE)

    async def gateways(self, addresses: list[str], parse: Callable[[str], Found]) -> dict[str, Found]:
        """What `parse` finds in the metrics of each gateway, by address. Raises GatewaysUnreachableError."""
        if not addresses:
            raise GatewaysUnreachableError("no gateway is ready")
        try:
            bodies = await asyncio.gather(*(self._body(address, self._port) for address in addresses))
        except (aiohttp.ClientError, TimeoutError) as error:
            # The message is constant, because each change of it is written to the status.
            raise GatewaysUnreachableError(
                f"port {self._port} of a gateway does not answer the operator; if spec.networkPolicy is set, add the "
                "operator's pods to networkPolicy.monitoring"
            ) from error
        found = {}
        # If several are unreadable, the message always names the first, because each change is written to the status.
        for address, body in zip(addresses, bodies, strict=True):
            try:
                found[address] = await _parsed(body, parse)
            except UnreadableMetricsError as error:
                raise GatewaysUnreachableError(
                    f"the metrics of the gateway at {address} cannot be read: {error}"
                ) from error
        return found

    async def engines(
        self, addresses: Sequence[str], port: int, parse: Callable[[str], Found]
    ) -> dict[str, Found]:
        """What `parse` finds in the metrics of the engines that answer, by address.

        Engines that load a model, or cannot be reached or understood, are left out.
        """
        found = await asyncio.gather(*(self._engine(address, port, parse) for address in addresses))
        return {address: one for address, one in zip(addresses, found, strict=True) if one is not None}

    async def _engine(self, address: str, port: int, parse: Callable[[str], Found]) -> Found | None:
        async with self._places:
            try:
                return await _parsed(await self._body(address, port), parse)
            except (aiohttp.ClientError, TimeoutError):
                return None
            except UnreadableMetricsError as error:
                log.warning("the metrics of the engine at %s cannot be read: %s", address, error)
                return None

    async def _body(self, address: str, port: int) -> bytes:
        """/metrics of a pod, or its beginning if _parsed() rejects it for its size.

        Raises aiohttp.ClientError or TimeoutError if the pod does not answer with status 200.
        """
        host = f"[{address}]" if ":" in address else address
        url, timeout = f"http://{host}:{port}/metrics", aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
            if answer.status != HTTPStatus.OK:
                raise aiohttp.ClientResponseError(answer.request_info, answer.history, status=answer.status)
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    break
            return bytes(body)


async def _parsed(body: bytes, parse: Callable[[str], Found]) -> Found:
    """What `parse` finds in /metrics of a pod. Raises UnreadableMetricsError.

    A thread calls `parse` if the body is large.
    """
    if len(body) > MAX_BODY_BYTES:
        raise UnreadableMetricsError(f"they are larger than {MAX_BODY_BYTES >> 20} MiB")
    try:
        text = body.decode()
        return await asyncio.to_thread(parse, text) if len(body) > LARGE_BODY_BYTES else parse(text)
    except (ValueError, LookupError) as error:
        raise UnreadableMetricsError("they are not as the operator expects") from error
