"""A prefix cache that both engines of a local stack share, in the stack's folder."""

import secrets
from pathlib import Path
from typing import Literal

from dps_engines.launch import FileCache
from dps_sglang.install import install

Sharing = Literal["separate", "common"]

MAX_BYTES = 64 * 2**30
MIN_FREE_BYTES = 2**30


def shared_cache(folder: Path) -> FileCache:
    """The cache of the stack with this folder."""
    return FileCache(
        directory=str(folder / "prefix-cache"),
        secret_file=str(folder / "prefix-cache-secret"),
        max_bytes=MAX_BYTES,
        min_free_bytes=MIN_FREE_BYTES,
    )


def plugin_folder(folder: Path) -> Path:
    """The folder with the plugin for SGLang."""
    return folder / "plugin"


def prepare(folder: Path) -> None:
    """Write a new secret, install the plugin and create the directory for the pages."""
    cache = shared_cache(folder)
    secret = Path(cache.secret_file)
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_urlsafe(32))
    Path(cache.directory).mkdir()
    install(plugin_folder(folder))
