"""A fingerprint of a checkpoint: SHA-256 of its weights, configuration and code, so that changes are noticed.

These are the files of its folder, without subfolders, with one of the suffixes below.

SGLang has just read the files, so they usually come from the operating system's page cache. One thread hashes about
1.5 GB/s.
"""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
OTHER_SUFFIXES = {".json", ".py"}
"""Configuration files, including those for quantization, and the model's own code."""
THREADS = 8
HUB_BLOB = re.compile(r"[0-9a-f]{64}")
"""The Hub's client stores a large file under its SHA-256, and creates a link of the file's name to it."""


def fingerprint(folder: Path) -> str:
    """SHA-256 of the names and contents of the model's weights, configuration and code.

    Raises OSError if a file cannot be read, and ValueError if the folder holds no weights.
    """
    suffixes = WEIGHT_SUFFIXES | OTHER_SUFFIXES
    files = sorted(path for path in folder.iterdir() if path.suffix in suffixes)
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise ValueError(f"no weights in {folder}")
    with ThreadPoolExecutor(THREADS, thread_name_prefix="dps-prefix-cache-weights") as threads:
        contents = threads.map(_sha256, files)
        digest = hashlib.sha256()
        for path, content in zip(files, contents, strict=True):
            digest.update(f"{path.name}\0{content}\0".encode())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    target = path.resolve()
    if target.parent.name == "blobs" and HUB_BLOB.fullmatch(target.name):
        return target.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
