"""Reloading the configuration, and the files with keys and certificates that it names, when their content changes."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dps_gateway.config import ConfigError, GatewayConfig, parse_config, read_text
from dps_gateway.pool import Pool
from dps_gateway.runtime import Runtime

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0


def _named_files(config: GatewayConfig) -> Iterator[Path]:
    """The files with keys, tokens and certificates that the configuration names."""
    listen, pools = config.listen, [config.pools[pool] for pool in Pool]
    paths = [config.auth.keys_file, config.session.redis_url_file, listen.admin_token_file]
    paths += [path for pool in pools for path in (pool.api_key_file, pool.ca_file)]
    if listen.tls is not None:
        paths += [listen.tls.cert_file, listen.tls.key_file]
    yield from (path for path in paths if path is not None)


class ConfigFile:
    """The configuration file, or the content of its ConfigMap until the kubelet has updated the file.

    Detects changes in the content of the configuration file and of the files that it names. Modification times are not
    enough: Kubernetes updates a mounted ConfigMap or Secret by swapping a symbolic link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._newest = ""
        self._superseded: set[str] = set()
        self._loaded: dict[Path, str | None] = {}
        """The digests of the files, as of just before they were last loaded; None for those that could not be read."""

    def load(
        self, in_effect: Callable[[GatewayConfig], GatewayConfig] = lambda config: config
    ) -> GatewayConfig:
        """Load the newest configuration. The caller then loads the files that it names. Raises ConfigError.

        in_effect: returns the configuration that will be used if this one is applied.
        """
        self._loaded = {self.path: _digest(self.path)}
        config = parse_config(self.text(), source=str(self.path))
        self._loaded |= {path: _digest(path) for path in _named_files(in_effect(config))}
        return config

    def changed(self) -> bool:
        """Whether a file has changed since the configuration was last loaded, even if it could not be used.

        A file that cannot be read counts as unchanged, because it may be in the middle of being replaced.
        """
        current = ((_digest(path), loaded) for path, loaded in self._loaded.items())
        return any(digest not in (None, loaded) for digest, loaded in current)

    def receive(self, text: str) -> bool:
        """Use the ConfigMap's current content. False if it is in use. Raises ConfigError as `text` does."""
        current = self.text()
        if text == current:
            return False
        self._superseded |= {current, read_text(self.path)}
        self._newest = text
        return True

    def text(self) -> str:
        """The newest content. Raises ConfigError if the file cannot be read."""
        on_disk = read_text(self.path)
        return self._newest if on_disk in self._superseded else on_disk


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


async def watch_config(source: ConfigFile, runtime: Runtime) -> None:
    """Poll the files and reload the configuration when one of them changes, until cancelled."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if source.changed():
            reload_config(source, runtime)


def receive_config(text: str, source: ConfigFile, runtime: Runtime) -> None:
    """Reload the configuration from the content of its ConfigMap, unless it is the one in use."""
    if source.receive(text):
        reload_config(source, runtime)


def reload_config(source: ConfigFile, runtime: Runtime) -> bool:
    """Load and apply the configuration. If it is invalid, keep the current configuration and return False."""
    try:
        runtime.apply(source.load(runtime.in_effect))
    except ConfigError as error:
        log.error("configuration not reloaded, the previous one stays in use: %s", error)
        runtime.metrics.config_reloads.labels("refused").inc()
        runtime.metrics.config_valid.set(0)
        runtime.config_error = str(error)
        return False
    log.info("configuration reloaded")
    runtime.metrics.config_reloads.labels("applied").inc()
    runtime.metrics.config_valid.set(1)
    runtime.configured_at, runtime.config_error = time.time(), None
    return True
