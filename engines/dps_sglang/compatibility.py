"""Whether the running SGLang is one that this plugin was tested with.

The plugin depends on functions that SGLang does not document. If the version or a signature differs, the engine shares
no pages.
"""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

VERSIONS = frozenset({"0.5.23"})

UNIFIED_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"

BUILD_SIDECARS = f"{UNIFIED_CACHE}._build_sidecar_transfers"
DRAFT_PREFILL = f"{DRAFT_WORKER}._draft_extend_for_prefill"

GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"

SERVER_INFO = "sglang.srt.server_args.ServerArgs.resolved_dict"

MOONCAKE_STORE = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_store.MooncakeStore"
MOONCAKE_INIT = f"{MOONCAKE_STORE}.__init__"
MOONCAKE_CLEAR = f"{MOONCAKE_STORE}.clear"
MOONCAKE_READ = f"{MOONCAKE_STORE}.batch_get_v1"
MOONCAKE_WRITE = f"{MOONCAKE_STORE}.batch_set_v1"
MOONCAKE_STATS = f"{MOONCAKE_STORE}.get_stats"
MOONCAKE_GET = f"{MOONCAKE_STORE}._get_batch_zero_copy_impl"
MOONCAKE_PUT = f"{MOONCAKE_STORE}._put_batch_zero_copy_impl"

WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WEIGHT_UPDATES = tuple(
    f"{WEIGHT_UPDATER}.{name}"
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "begin_weight_update",
        "end_weight_update",
    )
)
"""Between the last two, another process may write weights into the engine's memory without a further request."""
WEIGHT_CHECK = f"{WEIGHT_UPDATER}.check_weights"
MEMORY_RELEASE = f"{WEIGHT_UPDATER}.release_memory_occupation"

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
ATTACH_STORAGE = f"{SCHEDULER}.attach_hicache_storage_wrapped"
FLUSH = f"{SCHEDULER}.flush_cache"

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*WEIGHT_UPDATES, WEIGHT_CHECK, MEMORY_RELEASE, ATTACH_STORAGE), ("self", "recv_req")),
    FLUSH: ("self", "empty_cache"),
    MOONCAKE_INIT: ("self", "storage_config", "mem_pool"),
    MOONCAKE_CLEAR: ("self",),
    MOONCAKE_READ: ("self", "keys", "host_indices", "extra_info"),
    MOONCAKE_WRITE: ("self", "keys", "host_indices", "extra_info"),
    MOONCAKE_STATS: ("self",),
    MOONCAKE_GET: ("self", "key_strs", "buffer_ptrs", "buffer_sizes"),
    MOONCAKE_PUT: ("self", "key_strs", "buffer_ptrs", "buffer_sizes", "group_ids", "session_ids"),
    f"{HOST_POOL}.get_data_page": ("self", "index", "flat"),
    BUILD_SIDECARS: ("self", "phase", "kv_xfer", "comp_xfers"),
    DRAFT_PREFILL: (
        "self",
        "batch",
        "target_hidden_states",
        "next_token_ids",
        "mm_input_embeds",
        "kv_loc_plan",
    ),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (
        "batch",
        "model_runner",
        "capture_hidden_mode",
        "return_hidden_states_before_norm",
        "extend_position_info",
        "spec_mrope_positions",
        "kv_loc_plan",
        "write_cols",
    ),
}
"""The functions that the plugin wraps and calls to share pages."""
SALT_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    GENERATE: ("self", "obj", "request"),
    SERVER_INFO: ("self",),
}
"""The functions that `cache_salt` wraps."""


def objection(
    version: str,
    signatures: Mapping[str, tuple[str, ...]],
    resolve: Callable[[str], Any] = pkgutil.resolve_name,
) -> str | None:
    """The reason why this SGLang cannot be used, or None if it can."""
    if version not in VERSIONS:
        return f"SGLang {version} is not supported; supported: {', '.join(sorted(VERSIONS))}"
    for target, expected in signatures.items():
        try:
            parameters = tuple(inspect.signature(resolve(target)).parameters)
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            return f"{target} cannot be used: {error}"
        if parameters != expected:
            return f"{target} takes {parameters}, expected {expected}"
    return None
