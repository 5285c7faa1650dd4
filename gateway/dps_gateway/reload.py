"""Reloading the configuration, and the files with keys and certificates that it names, when their content changes."""

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dps_gateway.config import ConfigError, GatewayConfig, parse_config, read_text
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
    paths = [config.auth.keys_file, config.session.redis_url_file, listen.admin_token_file]
    paths += [path for pool in pools for path in (pool.api_key_file, pool.ca_file)]
    if listen.tls is not None:
        paths += [listen.tls.cert_file, listen.tls.key_file]
    yield from (path for path in paths if path is not None)


class Source:
    """The configuration file, or the content of its ConfigMap until the kubelet has updated the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._newest = ""
        self._superseded: set[str] = set()

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


async def watch_config(source: Source, runtime: Runtime) -> None:
    """Poll the files and reload the configuration when one of them changes, until cancelled."""
    watch = Watch(source.path, runtime.config)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if watch.changed(runtime.config):
            reload_config(source, runtime)


def receive_config(text: str, source: Source, runtime: Runtime) -> None:
    """Reload the configuration from the content of its ConfigMap, unless it is the one in use."""
    if source.receive(text):
        reload_config(source, runtime)


def reload_config(source: Source, runtime: Runtime) -> bool:
    """Load and apply the configuration. If it is invalid, keep the current configuration and return False."""
    try:
        runtime.apply(parse_config(source.text(), source=str(source.path)))
    except ConfigError as error:
        log.error("configuration not reloaded, the previous one stays in use: %s", error)
        runtime.metrics.config_reloads.labels("refused").inc()
        runtime.metrics.config_valid.set(0)
        return False
    log.info("configuration reloaded")
    runtime.metrics.config_reloads.labels("applied").inc()
    runtime.metrics.config_valid.set(1)
    return True
