"""The configuration file, taken on when it changes.

A bad one is refused, the running one is kept, and a metric says so.
"""

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Final

from dps_gateway.config import ConfigError, load_config
from dps_gateway.runtime import Runtime

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
"""The content is compared, not the time: Kubernetes swaps a link to update a mounted ConfigMap."""


async def watch_config(path: Path, runtime: Runtime) -> None:
    """Look at the file every second, for ever."""
    seen = _digest(path)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        digest = _digest(path)
        if digest is not None and digest != seen:
            seen = digest
            reload_config(path, runtime)


def reload_config(path: Path, runtime: Runtime) -> bool:
    """Take on the file as it is now; False if it was refused."""
    try:
        runtime.apply(load_config(path))
    except ConfigError as error:
        log.error("the new configuration is refused, the running one stays: %s", error)
        runtime.metrics.config_reloads.labels("refused").inc()
        runtime.metrics.config_valid.set(0)
        return False
    log.info("configuration reloaded")
    runtime.metrics.config_reloads.labels("applied").inc()
    runtime.metrics.config_valid.set(1)
    return True


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # between two versions of a file there may be none
        return None
