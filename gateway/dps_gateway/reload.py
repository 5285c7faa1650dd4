"""Reloading the configuration, and the files with keys and certificates that it names, when their content changes."""

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dps_gateway.config import ConfigError, GatewayConfig, load_config
from dps_gateway.pool import Pool
from dps_gateway.runtime import Runtime

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0


class Watch:
    """Detects changes in the content of the configuration file and of the files that it names.

    Modification times are not enough: Kubernetes updates a mounted ConfigMap or Secret by swapping a symbolic link.
    """

    def __init__(self, path: Path, config: GatewayConfig) -> None:
        self._path = path
        self._seen = self._digests(config)

    def changed(self, config: GatewayConfig) -> bool:
        """Whether any file has changed since the previous call. `config` is the one in use.

        A file that cannot be read counts as unchanged, because it may be in the middle of being replaced.
        """
        current = self._digests(config)
        changed = any(self._seen.get(path, digest) != digest for path, digest in current.items())
        self._seen |= current
        return changed

    def _digests(self, config: GatewayConfig) -> dict[Path, str]:
        found = {}
        for path in (self._path, *_named_files(config)):
            try:
                found[path] = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError:
                continue
        return found


def _named_files(config: GatewayConfig) -> Iterator[Path]:
    """The files with keys, tokens and certificates that the configuration names."""
    listen, pools = config.listen, [config.pools[pool] for pool in Pool]
    paths = [config.auth.keys_file, listen.admin_token_file]
    paths += [path for pool in pools for path in (pool.api_key_file, pool.ca_file)]
    if listen.tls is not None:
        paths += [listen.tls.cert_file, listen.tls.key_file]
    yield from (path for path in paths if path is not None)


async def watch_config(path: Path, runtime: Runtime) -> None:
    """Poll the files and reload the configuration when one of them changes, until cancelled."""
    watch = Watch(path, runtime.config)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if watch.changed(runtime.config):
            reload_config(path, runtime)


def reload_config(path: Path, runtime: Runtime) -> bool:
    """Load and apply the configuration file. If it is invalid, keep the current configuration and return False."""
    try:
        runtime.apply(load_config(path))
    except ConfigError as error:
        log.error("configuration not reloaded, the previous one stays in use: %s", error)
        runtime.metrics.config_reloads.labels("refused").inc()
        runtime.metrics.config_valid.set(0)
        return False
    log.info("configuration reloaded")
    runtime.metrics.config_reloads.labels("applied").inc()
    runtime.metrics.config_valid.set(1)
    return True
