"""Requests for the metrics of a DPSRouter's engines."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

from dps_operator.errors import UnreadableMetricsError
from dps_operator.pod_metrics import Found, metrics_body, parsed

AT_ONCE: Final = 8
"""Engines whose metrics are requested at the same time, because an answer can have hundreds of kilobytes."""

log = logging.getLogger(__name__)


class EngineMetrics:
    """Reads /metrics of engines. Those that load a model, or cannot be reached or understood, are left out."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._places = asyncio.Semaphore(AT_ONCE)

    async def read(
        self, addresses: Sequence[str], port: int, parse: Callable[[str], Found]
    ) -> dict[str, Found]:
        """What `parse` finds in the metrics of the engines that answer, by address. parse: as in parsed()."""
        found = await asyncio.gather(*(self._one(address, port, parse) for address in addresses))
        return {address: one for address, one in zip(addresses, found, strict=True) if one is not None}

    async def _one(self, address: str, port: int, parse: Callable[[str], Found]) -> Found | None:
        async with self._places:
            try:
                return await parsed(await metrics_body(self._session, address, port), parse)
            except (aiohttp.ClientError, TimeoutError):
                return None
            except UnreadableMetricsError as error:
                log.warning("the metrics of the engine at %s cannot be read: %s", address, error)
                return None
