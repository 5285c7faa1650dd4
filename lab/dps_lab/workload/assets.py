"""BFCL's multi-turn sessions, with bundled sample sessions for machines that cannot reach a registry.

`python -m dps_lab.workload.assets` downloads what is missing and prints what will be used.
"""

import sys
import zipfile
from functools import cache
from importlib.resources import files
from pathlib import Path

from dps_lab.workload.bfcl import CATEGORIES, FUNCTION_FILES
from dps_local.assets import Asset, FetchError, cached, only_file, qwen_tokenizer, run_client

BFCL_VERSION = "2026.3.23"

_BFCL_DATA = "bfcl_eval/data/"
_BFCL_MEMBERS = (
    *(
        f"{_BFCL_DATA}{folder}BFCL_v4_multi_turn_{category}.json"
        for folder in ("", "possible_answer/")
        for category in CATEGORIES
    ),
    *(f"{_BFCL_DATA}multi_turn_func_doc/{name}.json" for name in FUNCTION_FILES.values()),
)


@cache
def bfcl() -> Asset:
    """The folder with BFCL's multi-turn data, or else the bundled sample, a `.jsonl` file of recorded sessions.

    Source: PyPI package `bfcl-eval` (Apache-2.0). A failed download does not raise.
    """
    try:
        path = cached(f"bfcl-eval-{BFCL_VERSION}", _fetch_bfcl)
    except (FetchError, OSError) as error:
        return Asset(bundled_sessions(), "bundled", f"the bundled sample sessions, not BFCL ({error})")
    return Asset(path, "registry", f"BFCL multi-turn, from PyPI bfcl-eval {BFCL_VERSION}")


def bundled_sessions() -> Path:
    """The sample sessions that are part of this package."""
    return Path(str(files("dps_lab"))) / "data" / "sessions.jsonl"


def _fetch_bfcl(scratch: Path, target: Path) -> None:
    download = ["pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1", "--no-deps"]
    run_client([sys.executable, "-m", *download, f"bfcl-eval=={BFCL_VERSION}"], scratch)
    with zipfile.ZipFile(only_file(scratch, "*.whl")) as archive:
        for name in _BFCL_MEMBERS:
            try:
                content = archive.read(name)
            except KeyError:
                raise FetchError(f"the package has no {name}") from None
            destination = target / name.removeprefix(_BFCL_DATA)
            destination.parent.mkdir(exist_ok=True)
            destination.write_bytes(content)


def main() -> int:
    """Download missing input data and print the origin of each. Returns 0 even if a bundled file is used."""
    for title, asset in (("tokenizer", qwen_tokenizer()), ("sessions", bfcl())):
        print(f"{title}: {asset.description}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
