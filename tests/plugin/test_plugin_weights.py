"""The fingerprint of a checkpoint."""

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from dps_sglang.weights import fingerprint


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
