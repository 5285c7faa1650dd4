"""Requests for the metrics of a DPSRouter's engines."""

import asyncio
from collections.abc import Sequence
from typing import Final

import aiohttp

from dps_operator.gateway_metrics import metrics_text

AT_ONCE: Final = 8
"""Engines whose metrics are requested at the same time, because an answer can have hundreds of kilobytes."""


class EngineMetrics:
    """Reads /metrics of engines. Those that load a model, or cannot be reached, are left out."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._places = asyncio.Semaphore(AT_ONCE)

    async def texts(self, addresses: Sequence[str], port: int) -> dict[str, str]:
        """The metrics of the engines that answer, by address, in Prometheus's text format."""
        texts = await asyncio.gather(*(self._one(address, port) for address in addresses))
        return {address: text for address, text in zip(addresses, texts, strict=True) if text is not None}

    async def _one(self, address: str, port: int) -> str | None:
        async with self._places:
            try:
                return await metrics_text(self._session, address, port)
            except (aiohttp.ClientError, TimeoutError, ValueError):
                return None
