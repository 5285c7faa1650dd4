"""Reads configurations of models from the Hugging Face Hub."""

import json
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import aiohttp
from yarl import URL

from dps_engines.models import ModelFacts, UnknownSizeError, facts_of
from dps_operator.errors import UnreadableModelError
from dps_operator.model_sizes import HubModel

TIMEOUT_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 300.0
"""Time after which a configuration that could not be read is requested again, if its DPSRouter is reconciled."""
MAX_BYTES: Final = 1 << 20
MAX_REDIRECTS: Final = 3


class ModelHub:
    """Reads config.json of models. Results and failures are cached.

    endpoint: base URL of the Hub or of a mirror. No token is sent, so gated and private
    models are not readable. now: a monotonic clock in seconds.
    """

    def __init__(
        self, session: aiohttp.ClientSession, endpoint: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._endpoint = endpoint.rstrip("/")
        self._now = now
        self._sizes: dict[HubModel, ModelFacts] = {}
        self._failures: dict[HubModel, tuple[float, str]] = {}
        self._unreachable_until = 0.0

    async def size(self, model: HubModel) -> ModelFacts:
        """The sizes of a model. Raises UnreadableModelError."""
        if model in self._sizes:
            return self._sizes[model]
        until, reason = self._failures.get(model, (0.0, ""))
        if self._now() < until:
            raise UnreadableModelError(reason)
        try:
            facts = facts_of(await self._configuration(model))
        except (UnknownSizeError, UnreadableModelError) as error:
            self._failures[model] = self._now() + RETRY_SECONDS, str(error)
            raise UnreadableModelError(str(error)) from error
        self._failures.pop(model, None)
        self._sizes[model] = facts
        return facts

    async def _configuration(self, model: HubModel) -> dict[str, Any]:
        """config.json of a model. Raises UnreadableModelError."""
        # One attempt for all models, so that an unreachable Hub does not delay each reconcile.
        unreachable = f"{self._endpoint} does not answer the operator"
        if self._now() < self._unreachable_until:
            raise UnreadableModelError(unreachable)
        url = f"{self._endpoint}/{model.name}/resolve/{quote(model.revision or 'main', safe='')}/config.json"
        try:
            status, body = await self._get(url)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self._unreachable_until = self._now() + RETRY_SECONDS
            raise UnreadableModelError(unreachable) from error
        if status != HTTPStatus.OK:
            raise UnreadableModelError(f"{url} returned status {status}")
        try:
            config = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UnreadableModelError(f"{url} is not JSON of at most {MAX_BYTES >> 20} MiB") from error
        if not isinstance(config, dict):
            raise UnreadableModelError(f"{url} is not a JSON object")
        return config

    async def _get(self, url: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        target = URL(url, encoded=True)
        async with self._session.get(target, timeout=timeout, max_redirects=MAX_REDIRECTS) as answer:
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > MAX_BYTES:
                    return answer.status, b""
            return answer.status, bytes(body)
