"""Modules of these tests that SGLang loads as plugins: each has a function `register`."""

from pathlib import Path
from types import ModuleType


def install(folder: Path, *modules: ModuleType) -> None:
    """Write the modules, and the metadata by which SGLang finds them, to a new folder for an engine's PYTHONPATH."""
    folder.mkdir()
    for module in modules:
        assert module.__file__ is not None
        source = Path(module.__file__)
        (folder / source.name).write_text(source.read_text())
        metadata = folder / f"{source.stem}-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {source.stem}\nVersion: 0\n")
        entry_point = f"[sglang.srt.plugins]\n{source.stem} = {source.stem}:register\n"
        (metadata / "entry_points.txt").write_text(entry_point)
