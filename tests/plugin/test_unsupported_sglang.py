"""An SGLang that the plugin does not know: the engine starts, and shares no pages."""

import subprocess
import sys
from pathlib import Path

STORAGE = """
from abc import ABC, abstractmethod

class HiCacheStorage(ABC):
    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def exists(self, key): ...
    def register_mem_pool_host(self, mem_pool_host): ...
"""
"""The storage interface of SGLang 0.5.8, without the names that the plugin imports from later versions."""

ENGINE = """
import logging
from dps_sglang.adapter import SharedPrefixCache
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from tests.plugin.test_plugin_metrics import states

logging.basicConfig(format="%(message)s")
assert issubclass(SharedPrefixCache, HiCacheStorage)
storage = SharedPrefixCache("configuration", {})
storage.register_mem_pool_host("pool")
print(storage.batch_set_v1(["a"], [0]), storage.batch_exists(["a"]), storage.batch_get_v1(["a"], [0]))
print(storage.set("a", b""), storage.exists("a"), storage.get("a"), storage.batch_get(["a"]))
storage.clear()
print(states())
"""


def test_engine_with_another_version_starts_and_shares_no_pages(tmp_path: Path) -> None:
    package = tmp_path / "sglang/srt/mem_cache"
    package.mkdir(parents=True)
    (package / "hicache_storage.py").write_text(STORAGE)
    metadata = tmp_path / "sglang-0.5.8.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.8\n")

    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    engine = subprocess.run([sys.executable, "-c", path + ENGINE], capture_output=True, text=True)

    assert engine.returncode == 0, engine.stderr
    reason = "SGLang 0.5.8 is not supported; supported: 0.5.23"
    assert engine.stdout.splitlines() == [
        "[False] 0 [False]",
        "False False None [None]",
        f"[('', '{reason}')]",
    ]
    assert f"dps prefix cache: not shared: {reason}" in engine.stderr
    assert "an engine cannot clear the shared store" in engine.stderr
