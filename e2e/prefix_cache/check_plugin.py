# mypy: disable-error-code="import-not-found"
"""check_plugin.py DIRECTORY: use the installed plugin through SGLang's own code, and print the results as JSON.

Run by SGLang's interpreter, with the plugin on its path. It starts no server: SGLang loads the plugin, creates the
storage backend, and copies pages between its host memory pools and the store.
"""

import json
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from prometheus_client import REGISTRY
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from dps_sglang import compatibility, identity
from dps_sglang.metrics import SHARING
from dps_sglang.mooncake import tagged
from dps_sglang.plugin import register
from dps_sglang.sharing import not_shared

LAYOUTS = {
    "layer_first": (2, 4, 128, 2, 32),
    "page_first": (2, 128, 4, 2, 32),
    "page_first_direct": (2, 8, 4, 16, 2, 32),
}
"""Shape of a host pool with 4 layers, 8 pages of 16 tokens and 2 heads of 32."""
KEYS = [f"{number:064x}" for number in range(8)]
ATTEMPTS = 30
"""Each takes at most about a second."""


def pool(layout: str, dtype: torch.dtype, seed: int | None) -> Any:
    """A host pool with random content, or with zeros; only the attributes that copying pages requires are set."""
    made = MHATokenToKVPoolHost.__new__(MHATokenToKVPoolHost)
    made.layout, made.dtype, made.page_size = layout, dtype, 16
    made.layer_num, made.head_num, made.head_dim = 4, 2, 32
    made.kv_buffer = torch.zeros(LAYOUTS[layout], dtype=dtype)
    if seed is not None:
        torch.manual_seed(seed)
        made.kv_buffer.copy_(torch.randn(LAYOUTS[layout]))
    return made


def backend(folder: Path, host: Any, secret_file: str = "secret", **arguments: Any) -> Any:
    """The storage backend of an engine with these arguments, created as SGLang creates it."""
    extra = {
        "backend_name": "dps",
        "module_path": "dps_sglang.adapter",
        "class_name": "SharedPrefixCache",
        "interface_v1": 1,
        "directory": str(folder),
        "secret_file": str(folder / secret_file),
        "max_gib": 1,
        "weights": "test",
    }
    created = StorageBackendFactory.create_backend("dynamic", storage_config(extra), host)
    with engine_arguments(**arguments):
        created.register_mem_pool_host(host)
    return created


def storage_config(extra: dict[str, Any]) -> HiCacheStorageConfig:
    """SGLang's configuration of a storage backend with these settings."""
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="m",
        extra_config=extra,
    )


def engine_arguments(**arguments: Any) -> AbstractContextManager[Any]:
    """A context in which the engine has these arguments."""
    options: dict[str, Any] = {"model_path": "/model", "load_format": "auto", "dtype": "float32"}
    options |= {"kv_cache_dtype": "auto", "enable_lora": False, "quantization": None}
    options |= {"tokenizer_worker_num": 1, "speculative_algorithm": None} | arguments
    return patch.object(identity, "get_server_args", lambda: SimpleNamespace(**options))


def model(folder: Path, name: str, weights: bytes) -> Path:
    """A folder with the files of a model."""
    made = folder / name
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.bin").write_bytes(weights)
    return made


def mooncake_store(host: Any, model: Path, hook: Any = tagged, **arguments: Any) -> Any:
    """A store without a master, whose `config_prefix` precedes the names of an engine's pages in Mooncake.

    Its bandwidth cannot be measured. The operator's tag is `router`. hook: wraps the constructor.
    """

    def init(store: Any, config: HiCacheStorageConfig, _pool: Any) -> None:
        assert config.extra_config is not None
        store.config_prefix = config.extra_config["extra_backend_tag"]

    store = SimpleNamespace(store=SimpleNamespace(register_buffer=lambda *_: -1))
    with engine_arguments(model_path=str(model), **arguments):
        hook(init, store, storage_config({"extra_backend_tag": "router"}), host)
    return store


def hook_without_refill() -> Any:
    """The hook for Mooncake that the plugin installs if this SGLang's draft models cannot prefill what was fetched."""
    hooks = {}
    with (
        patch.object(HookRegistry, "register", lambda target, hook, _type: hooks.update({target: hook})),
        patch.object(compatibility, "REFILL_SIGNATURES", {"sglang.no_such_function": ()}),
    ):
        register()
    return hooks[compatibility.MOONCAKE_INIT]


def problems() -> list[str]:
    """What keeps this process from sharing or reading pages, as exported."""
    return [
        sample.labels["problem"]
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == SHARING and sample.value == 1
    ]


def replace_weights() -> None:
    """Call SGLang's method that replaces the weights of a running engine. Without an engine, it fails."""
    with suppress(AttributeError):
        SchedulerWeightUpdaterManager.update_weights_from_disk(SimpleNamespace(), None)


def store_all(writer: Any, slots: Any) -> None:
    """Write all pages. A page is not stored if a slow disk keeps other writers of its shard waiting for a second."""
    for _ in range(ATTEMPTS):
        if all(writer.batch_set_v1(KEYS, slots)):
            return
    raise AssertionError(f"not all pages were stored in {ATTEMPTS} attempts")


def round_trip(folder: Path, layout: str, dtype: torch.dtype) -> bool:
    """Whether a second engine reads exactly what the first one wrote."""
    source, target = pool(layout, dtype, seed=1), pool(layout, dtype, seed=None)
    writer, reader = backend(folder, source), backend(folder, target)
    slots = torch.arange(128)
    assert reader.batch_exists(KEYS) == 0
    store_all(writer, slots)
    writer.clear()
    assert reader.batch_exists(KEYS) == len(KEYS)
    assert all(reader.batch_get_v1(KEYS, slots))
    stats = reader.get_stats()
    assert stats.prefetch_pgs == [len(KEYS)]
    assert stats.prefetch_bandwidth[0] > 0
    assert reader.get_stats().prefetch_pgs == []
    return bool(torch.equal(source.kv_buffer, target.kv_buffer))


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "secret").write_bytes(b"a secret of thirty-two bytes....")
    load_plugins()
    result: dict[str, Any] = {"hooked": sorted(name.rpartition(".")[2] for name in HookRegistry._patched)}
    result["same"] = [
        round_trip(folder, layout, dtype)
        for layout in LAYOUTS
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    ]
    host = pool("page_first", torch.float32, seed=None)
    reader = backend(folder, host)
    result["pages found"] = reader.batch_exists_v2(KEYS).kv_hit_pages
    sidecar = PoolTransfer(name=PoolName.DRAFT, keys=KEYS)
    result["pages found if the draft model has a KV memory pool"] = reader.batch_exists_v2(
        KEYS, [sidecar]
    ).kv_hit_pages
    result["pages found with another quantization"] = backend(folder, host, quantization="fp8").batch_exists(
        KEYS
    )
    result["pages found with LoRA"] = backend(folder, host, enable_lora=True).batch_exists(KEYS)
    result["pages found without a secret"] = backend(folder, host, "absent").batch_exists(KEYS)
    result["pages found with EAGLE"] = backend(folder, host, speculative_algorithm="EAGLE").batch_exists(KEYS)
    with patch.object(compatibility, "VERSIONS", frozenset({"0.6.0"})), patch.dict(sys.modules):
        del sys.modules["dps_sglang.adapter"]  # which selects a class when it is imported
        unsupported = backend(folder, host)
    result["pages found with another version of SGLang"] = [
        unsupported.batch_exists(KEYS),
        unsupported.batch_exists_v2(KEYS).kv_hit_pages,
    ]
    result["pages found with several workers for HTTP"] = backend(
        folder, host, tokenizer_worker_num=2
    ).batch_exists(KEYS)
    first = model(folder, "first", b"weights")
    store = mooncake_store(host, first)
    tag = store.config_prefix
    assert tag.startswith("router-")

    def equal(model: Path, **arguments: Any) -> bool:
        return bool(mooncake_store(host, model, **arguments).config_prefix == tag)

    result["Mooncake tags that equal the first engine's"] = {
        "same weights elsewhere": equal(model(folder, "copy", b"weights")),
        "other weights": equal(model(folder, "tuned", b"wEights")),
        "other data type of the KV cache": equal(first, kv_cache_dtype="fp8_e5m2"),
        "EAGLE": equal(first, speculative_algorithm="EAGLE"),
        "unknown weights": equal(folder),
        "unsupported version": equal(first, hook=not_shared("this version is not supported")),
    }
    for algorithm in ("NGRAM", "STANDALONE"):
        mooncake_store(host, first, hook_without_refill(), speculative_algorithm=algorithm)
        result[f"problems of {algorithm} with Mooncake and no refill"] = problems()
    attached = Scheduler.attach_hicache_storage_wrapped(SimpleNamespace(), None)
    result["other storage can be attached"] = attached.success
    own = mooncake_store(host, first, speculative_algorithm="EAGLE")
    tags = [[tag], [own.config_prefix]]
    for _ in range(2):
        replace_weights()
        for used, each in zip(tags, (store, own), strict=True):
            used.append(each.config_prefix)
    result["pages found after the weights were replaced"] = reader.batch_exists(KEYS)
    result["pages found by a storage that was opened afterwards"] = backend(folder, host).batch_exists(KEYS)
    result["Mooncake tags that are used again after the weights were replaced"] = [
        used for used in tags if len(set(used)) < len(used)
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
