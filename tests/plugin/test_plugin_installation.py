"""The installation of the plugin, and the check of SGLang's functions."""

import subprocess
import sys
from pathlib import Path

from dps_sglang.compatibility import objection
from dps_sglang.install import install


def known(self: object, keys: object) -> None:
    """A function with the expected signature."""


def test_known_version_and_signatures_pass() -> None:
    assert objection("0.5.23", {"m.known": ("self", "keys")}, lambda _: known) is None


def test_unknown_version_is_refused() -> None:
    assert objection("0.6.0", {}) == "SGLang 0.6.0 is not supported; supported: 0.5.23"


def test_changed_signature_is_refused() -> None:
    reason = objection("0.5.23", {"m.known": ("self", "keys", "extra")}, lambda _: known)
    assert reason == "m.known takes ('self', 'keys'), expected ('self', 'keys', 'extra')"


def test_missing_function_is_refused() -> None:
    reason = objection("0.5.23", {"json.no_such_function": ()})
    assert reason is not None
    assert reason.startswith("json.no_such_function cannot be used")


def test_installed_copy_is_found_by_its_entry_point_and_replaces_an_older_one(tmp_path: Path) -> None:
    stale = tmp_path / "dps_sglang" / "stale.py"
    stale.parent.mkdir()
    stale.touch()
    install(tmp_path)
    assert not stale.exists()
    code = (
        "import importlib.metadata as m; (e,) = m.entry_points(group='sglang.srt.plugins'); "
        "f = e.load(); print(e.name, f.__module__, f.__code__.co_filename)"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["dps_sglang", "dps_sglang.plugin", str(tmp_path / "dps_sglang/plugin.py")]
