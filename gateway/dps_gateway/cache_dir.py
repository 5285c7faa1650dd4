"""The folder of files that are kept only to save time."""

import os
from pathlib import Path
from tempfile import gettempdir


def cache_dir() -> Path:
    """`$DPS_CACHE_DIR`, or `~/.cache/dps-router`; without a home directory, in that of temporary files."""
    if configured := os.environ.get("DPS_CACHE_DIR"):
        return Path(configured)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(gettempdir())
    return home / ".cache" / "dps-router"
