"""The background task that writes to Redis the commits it could not accept in time."""

import asyncio
import logging
from typing import Final

from dps_gateway.session.store import SessionStore

log = logging.getLogger(__name__)

INTERVAL_SECONDS: Final = 0.1
"""Short, because other replicas cannot see a turn until it is written. A pass with nothing to write costs nothing."""


async def write_behind(store: SessionStore) -> None:
    """Flush unwritten commits periodically until cancelled."""
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        if flushed := await store.flush():
            log.info("wrote %d overdue session entries to Redis", flushed)
