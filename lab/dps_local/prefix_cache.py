"""The prefix cache that both SGLang servers of a local stack share: Mooncake, whose master is one of its processes."""

from pathlib import Path
from typing import Final, Literal

from dps_engines.launch import MooncakeCache

Sharing = Literal["separate", "common"]

SEGMENT_BYTES: Final = 4 * 2**30
"""The host memory that each engine contributes."""


def mooncake_cache(port: int, version: str) -> MooncakeCache:
    """The engines' settings. port: of the master. version: of SGLang."""
    return MooncakeCache(f"127.0.0.1:{port}", SEGMENT_BYTES, owner="dps up", version=version)


def master_command(python: str, port: int, http_port: int) -> list[str]:
    """The command line of the master, which belongs to the Mooncake of an interpreter.

    http_port: serves its metrics and its health.
    """
    return [python, "-m", "mooncake.cli", f"--rpc_port={port}", f"--metrics_port={http_port}"]


def plugin_folder(folder: Path) -> Path:
    """The folder with the plugin for SGLang."""
    return folder / "plugin"


def pages_folder(folder: Path) -> Path:
    """The folder that emulated engines share instead of a Mooncake store."""
    return folder / "prefix-cache"
