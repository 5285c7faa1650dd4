"""Pages and stores for the tests of the shared page store."""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dps_sglang.storage.geometry import Geometry
from dps_sglang.storage.page import HEADER_BYTES, PageFormat
from dps_sglang.storage.store import SHARDS, Limits, PageStore

SECRET = b"a secret of thirty-two bytes....."
PAYLOAD_BYTES = 4096
PAGE_BYTES = PAYLOAD_BYTES + HEADER_BYTES
GEOMETRY = Geometry(
    engine_version="0.5.23",
    weights="revision-1",
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    pool="MHATokenToKVPoolHost",
    layout="page_first",
    page_tokens=64,
    page_bytes=PAYLOAD_BYTES,
    shard="tp 0/1",
)


def store(
    root: Path,
    geometry: Geometry = GEOMETRY,
    secret: bytes = SECRET,
    pages_per_shard: int = 100,
    minimum_free_bytes: int = 0,
    lock_seconds: float = 10.0,
) -> PageStore:
    page_bytes = geometry.page_bytes + HEADER_BYTES
    limits = Limits(SHARDS * pages_per_shard * page_bytes, minimum_free_bytes, lock_seconds)
    return PageStore(root, PageFormat.of(geometry, secret), limits)


def of_size(payload_bytes: int) -> Geometry:
    return replace(GEOMETRY, page_bytes=payload_bytes)


def payload(key: str, size: int = PAYLOAD_BYTES) -> bytes:
    """The payload of a key. It is derived from the key, so a test can recognise the wrong page."""
    return random.Random(key).randbytes(size)


def read(pages: PageStore, key: str, size: int = PAYLOAD_BYTES) -> bytes | None:
    buffer = bytearray(size)
    return bytes(buffer) if pages.get(key, memoryview(buffer)) else None


def files(root: Path, pattern: str = "*.page") -> Sequence[Path]:
    return sorted(root.glob(f"*/*/{pattern}"))


def total_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in [*files(root), *files(root, "*.tmp")])


class Memory:
    """The host memory of an engine. `pages` maps the first slot of each page to its content."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}

    def load(self, slot: int) -> memoryview:
        return memoryview(self.pages[slot])

    def buffer(self) -> memoryview:
        return memoryview(bytearray(PAYLOAD_BYTES))

    def save(self, slot: int, page: memoryview) -> None:
        self.pages[slot] = bytes(page)


def script(*arguments: object) -> list[str]:
    """The command line that runs the writer process."""
    return [sys.executable, str(Path(__file__).with_name("writer.py")), *map(str, arguments)]


def same_shard(tmp_path: Path, count: int) -> list[str]:
    """Keys whose pages compete for one shard."""
    pages = store(tmp_path / "probe")
    by_shard: dict[str, list[str]] = {}
    for number in range(count * SHARDS * 3):
        path, _ = pages._locate(str(number))
        by_shard.setdefault(path.parts[-3], []).append(str(number))
    return next(keys for keys in by_shard.values() if len(keys) >= count)[:count]
