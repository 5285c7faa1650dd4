"""Generated files are up to date with what they are generated from."""

from dps_tools.generate import ROOT, stale


def test_generated_files_are_up_to_date() -> None:
    assert stale(ROOT) == [], "run make generate"
