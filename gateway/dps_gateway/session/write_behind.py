"""The background task that retries commits that could not be written to Redis in time."""

import asyncio
import logging
from typing import Final

from dps_gateway.session.store import SessionStore

log = logging.getLogger(__name__)

INTERVAL_SECONDS: Final = 0.1
"""The interval is short because a turn is not available to other gateway replicas until it is written. A flush with
nothing to write is cheap."""


async def write_behind(store: SessionStore) -> None:
    """Flush unwritten commits periodically until cancelled."""
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        if flushed := await store.flush():
            log.info("wrote %d overdue session entries to Redis", flushed)
