"""A fingerprint of a checkpoint that does not require reading the whole checkpoint.

Names and sizes do not distinguish a fine-tuned checkpoint from its base. Every tensor of a safetensors file is
therefore sampled, and other weight files are sampled at regular offsets.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import BinaryIO

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".gguf"}
SAMPLE_BYTES = 1024
SAMPLES = 64
MAX_HEADER_BYTES = 100_000_000


def fingerprint(folder: Path) -> str:
    """SHA-256 of the model's configuration and of samples of its weights.

    Raises OSError if a file cannot be read, and ValueError if the folder holds no weights.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise ValueError(f"no weights in {folder}")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in files:
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in _offsets(file, path.suffix, size):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _offsets(file: BinaryIO, suffix: str, size: int) -> list[int]:
    """Where to sample: the middle of every tensor, or regular offsets where the tensors are unknown."""
    if suffix == ".safetensors" and size > 8:
        (length,) = struct.unpack("<Q", file.read(8))
        if length <= min(MAX_HEADER_BYTES, size - 8):
            header = json.loads(file.read(length))
            spans = sorted(
                tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"
            )
            return [0, *(8 + length + _middle(start, end) for start, end in spans)]
    return [size * number // SAMPLES for number in range(SAMPLES)] + [max(0, size - SAMPLE_BYTES)]


def _middle(start: int, end: int) -> int:
    return max(start, int((start + end - SAMPLE_BYTES) // 2))
