"""Generated files are up to date with what they are generated from."""

from pathlib import Path

import pytest

from dps_tools import generate
from dps_tools.generate import ROOT, stale


def test_generated_files_are_up_to_date() -> None:
    assert stale(ROOT) == [], "run make generate"


def test_missing_and_changed_files_are_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "FILES", {"a": lambda: "1", "b": lambda: "2"})
    (tmp_path / "a").write_text("1")
    assert stale(tmp_path) == ["b"]
    (tmp_path / "b").write_text("edited")
    assert stale(tmp_path) == ["b"]
    (tmp_path / "b").write_text("2")
    assert stale(tmp_path) == []
