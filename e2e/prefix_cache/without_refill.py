"""An SGLang plugin that keeps the draft model of a STANDALONE engine from prefilling what was fetched, on request.

No refill takes place while the file exists that the environment variable WITHOUT_REFILL names.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "WITHOUT_REFILL"
METADATA = "Metadata-Version: 2.1\nName: without-refill\nVersion: 0\n"
ENTRY_POINTS = "[sglang.srt.plugins]\nwithout_refill = without_refill:register\n"


def install(folder: Path) -> None:
    """Write this module, and the metadata by which SGLang finds it, to a new folder for an engine's PYTHONPATH."""
    folder.mkdir()
    (folder / "without_refill.py").write_text(Path(__file__).read_text())
    metadata = folder / "without_refill-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    """Called by SGLang in each of its processes."""
    from dps_sglang import draft_refill  # which needs torch

    # By name, because mypy permits no assignment to a function.
    setattr(draft_refill, "needs_refill", unless_requested(draft_refill.needs_refill))  # noqa: B010


def unless_requested(needs_refill: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a request needs a refill, or False while the file exists."""
    file = Path(os.environ[VARIABLE])
    return lambda request: not file.exists() and needs_refill(request)
