"""`python -m dps_sglang.install DIRECTORY`: copy the plugin to a directory from which an engine loads it.

The engine needs DIRECTORY on its PYTHONPATH. SGLang discovers plugins by their entry points, so the package's
metadata is installed as well.
"""

import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent
METADATA = "Metadata-Version: 2.1\nName: dps-sglang\nVersion: 0.1.0\n"
ENTRY_POINTS = "[sglang.srt.plugins]\ndps_sglang = dps_sglang.plugin:register\n"


def install(directory: Path) -> None:
    """Copy the package and its entry point into a directory, created if necessary. Replaces an older copy."""
    target = directory / PACKAGE.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = directory / "dps_sglang-0.1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dps_sglang.install DIRECTORY")
    install(Path(sys.argv[1]))
