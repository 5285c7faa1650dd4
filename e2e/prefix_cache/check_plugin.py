# mypy: disable-error-code="import-not-found"
"""check_plugin.py DIRECTORY: use the installed plugin through SGLang's own code, and print the results as JSON.

Run by SGLang's interpreter, with the plugin on its path. It starts neither a server nor Mooncake's master.
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
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from dps_sglang import identity
from dps_sglang.metrics import SHARING
from dps_sglang.mooncake import tagged
from dps_sglang.sharing import not_shared


def pool() -> Any:
    """A host pool with 8 pages of 16 tokens; only the attributes that identify pages are set."""
    made = MHATokenToKVPoolHost.__new__(MHATokenToKVPoolHost)
    made.layout, made.dtype, made.page_size = "page_first", torch.float32, 16
    made.layer_num, made.head_num, made.head_dim = 4, 2, 32
    made.kv_buffer = torch.zeros((2, 128, 4, 2, 32))
    return made


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

    The operator's tag is `router`. hook: wraps the constructor.
    """

    def init(store: Any, config: HiCacheStorageConfig, _pool: Any) -> None:
        assert config.extra_config is not None
        store.config_prefix = config.extra_config["extra_backend_tag"]

    store = SimpleNamespace()
    with engine_arguments(model_path=str(model), **arguments):
        hook(init, store, storage_config({"extra_backend_tag": "router"}), host)
    return store


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


def main() -> None:
    folder = Path(sys.argv[1])
    load_plugins()
    result: dict[str, Any] = {"hooked": sorted(name.rpartition(".")[2] for name in HookRegistry._patched)}
    host, first = pool(), model(folder, "first", b"weights")
    store = mooncake_store(host, first)
    tag = store.config_prefix
    assert tag.startswith("router-")

    def equal(model: Path, **arguments: Any) -> bool:
        return bool(mooncake_store(host, model, **arguments).config_prefix == tag)

    result["Mooncake tags that equal the first engine's"] = {
        "same weights elsewhere": equal(model(folder, "copy", b"weights")),
        "other weights": equal(model(folder, "tuned", b"wEights")),
        "other data type of the KV cache": equal(first, kv_cache_dtype="fp8_e5m2"),
        "other quantization": equal(first, quantization="fp8"),
        "EAGLE": equal(first, speculative_algorithm="EAGLE"),
        "LoRA": equal(first, enable_lora=True),
        "several workers for HTTP": equal(first, tokenizer_worker_num=2),
        "unknown weights": equal(folder),
        "unsupported version": equal(first, hook=not_shared("this version is not supported")),
    }
    attached = Scheduler.attach_hicache_storage_wrapped(SimpleNamespace(), None)
    result["other storage can be attached"] = attached.success
    own = mooncake_store(host, first, speculative_algorithm="EAGLE")
    tags = [[tag], [own.config_prefix]]
    for _ in range(2):
        replace_weights()
        for used, each in zip(tags, (store, own), strict=True):
            used.append(each.config_prefix)
    result["Mooncake tags that are used again after the weights were replaced"] = [
        used for used in tags if len(set(used)) < len(used)
    ]
    result["store opened afterwards has the first tag"] = equal(first)
    result["problems"] = problems()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
