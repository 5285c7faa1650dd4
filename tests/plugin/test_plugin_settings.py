"""Settings, the checkpoint's fingerprint, the check of SGLang's functions, and the installation."""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from dps_sglang.compatibility import objection
from dps_sglang.install import install
from dps_sglang.settings import GIBIBYTE, Settings, SettingsError
from dps_sglang.weights import fingerprint

VALID: dict[str, Any] = {
    "backend_name": "dps",
    "module_path": "dps_sglang.adapter",
    "class_name": "SharedPrefixCache",
    "interface_v1": 1,
    "directory": "/kv",
    "secret_file": "/secret/key",
    "max_gib": 100,
}


def test_settings_are_read() -> None:
    settings = Settings.parse(VALID | {"min_free_gib": 0.5, "weights": "abc"})
    assert (settings.directory, settings.secret_file) == (Path("/kv"), Path("/secret/key"))
    assert settings.limits.total_bytes == 100 * GIBIBYTE
    assert settings.limits.minimum_free_bytes == GIBIBYTE // 2
    assert settings.weights == "abc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_gb": 1}, "unknown setting 'max_gb'"),
        ({"interface_v1": 0}, "interface_v1 must be 1"),
        ({"directory": "kv"}, "directory must be an absolute path, not 'kv'"),
        ({"secret_file": None}, "secret_file must be an absolute path, not None"),
        ({"max_gib": "100"}, "max_gib must be a size in GiB, not '100'"),
        ({"max_gib": True}, "max_gib must be a size in GiB, not True"),
        ({"min_free_gib": -1}, "min_free_gib must be a size in GiB, not -1"),
        ({"weights": ""}, "weights must be a non-empty string"),
    ],
)
def test_invalid_setting_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.parse(VALID | change)


def test_unreadable_secret_is_an_error(tmp_path: Path) -> None:
    settings = Settings.parse(VALID | {"secret_file": str(tmp_path / "absent")})
    with pytest.raises(SettingsError, match=r"absent: No such file"):
        settings.secret()


def test_short_secret_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("15 bytes, and \n\n")
    settings = Settings.parse(VALID | {"secret_file": str(tmp_path / "secret")})
    with pytest.raises(SettingsError, match=r"secret has 13 bytes; use at least 16 random bytes"):
        settings.secret()


def checkpoint(folder: Path, tensors: dict[str, bytes], config: str = "{}", name: str = "model") -> Path:
    """A folder with a safetensors file."""
    folder.mkdir()
    header, data = {}, b""
    for tensor, values in tensors.items():
        header[tensor] = {
            "dtype": "U8",
            "shape": [len(values)],
            "data_offsets": [len(data), len(data) + len(values)],
        }
        data += values
    encoded = json.dumps(header).encode()
    (folder / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    (folder / "config.json").write_text(config)
    return folder


def test_same_checkpoint_has_the_same_fingerprint_elsewhere(tmp_path: Path) -> None:
    tensors = {"a": bytes(5000), "b": b"1" * 9000}
    assert fingerprint(checkpoint(tmp_path / "1", tensors)) == fingerprint(
        checkpoint(tmp_path / "2", tensors)
    )


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": {"a": bytes(5000), "b": b"2" * 9000}},
        {"tensors": {"a": bytes(5000), "b": b"1" * 8999 + b"2"}},
        {"tensors": {"a": bytes(5000), "c": b"1" * 9000}},
        {"config": '{"rope_theta": 5}'},
        {"name": "other"},
    ],
)
def test_other_checkpoint_has_another_fingerprint(tmp_path: Path, other: dict[str, Any]) -> None:
    same: dict[str, Any] = {"tensors": {"a": bytes(5000), "b": b"1" * 9000}}
    first = fingerprint(checkpoint(tmp_path / "1", **same))
    assert fingerprint(checkpoint(tmp_path / "2", **(same | other))) != first


@pytest.mark.parametrize("name", ["pytorch_model.bin", "quantization.json", "modeling.py"])
def test_fingerprint_includes_other_files_that_determine_kv(tmp_path: Path, name: str) -> None:
    folders = [checkpoint(tmp_path / number, {"a": b"1"}) for number in ("1", "2")]
    for number, folder in enumerate(folders):
        (folder / name).write_bytes(bytes(100_000) + bytes([number]))
    assert fingerprint(folders[0]) != fingerprint(folders[1])


def test_files_in_the_cache_of_the_hub_have_the_fingerprint_of_copies(tmp_path: Path) -> None:
    copied = checkpoint(tmp_path / "copied", {"a": b"1" * 100})
    snapshot, blobs = tmp_path / "snapshots/revision", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in copied.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    assert fingerprint(snapshot) == fingerprint(copied)


def test_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights in"):
        fingerprint(tmp_path)


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


def test_the_router_itself_registers_no_plugin() -> None:
    assert not [point for point in entry_points(group="sglang.srt.plugins") if point.value.startswith("dps_")]
