"""What determines the bytes of the running engine's pages: arguments, weights and host memory (SGLang 0.5.23)."""

import hashlib
import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_server_args

from dps_sglang.arguments import check_shareable
from dps_sglang.sharing import NotShareable
from dps_sglang.weights import fingerprint

logger = logging.getLogger(__name__)

POOL_ATTRIBUTES = ("layout", "page_size", "layer_num", "head_num", "head_dim", "storage_format_tag")
"""Attributes of SGLang's host memory that determine the order and the number of bytes in a page."""
KV_OPTIONS = (
    "quantization",
    "json_model_override_args",
    "quantization_param_path",
    "model_impl",
    "load_format",
    "model_loader_extra_config",
    "custom_weight_loader",
    "modelopt_quant",
    "quantize_and_serve",
    "rl_quant_profile",
    "prefill_kv_cache_dequant_dtype",
    "kt_weight_path",
    "kt_method",
)
"""Engine options that change KV without changing a page's shape."""


def pages_digest(config: Any, pool: Any, weights: str | None) -> str:
    """SHA-256 of everything that determines the bytes of the engine's pages, apart from the tokens.

    Two engines read each other's pages only if their digests are equal. Raises NotShareable if the engine must share
    none. config: SGLang's configuration of the storage. pool: its host memory. weights: name of the weights' revision;
    None to fingerprint the files.
    """
    arguments = get_server_args()
    check_shareable(arguments, rust_server=envs.SGLANG_RUST_SERVER.get())
    page = pool.get_data_page(0, flat=True)
    rank = "any" if config.is_mla_model else config.tp_rank  # MLA replicates KV on all ranks
    geometry = {
        "engine_version": f"sglang {version('sglang')}",
        "weights": weights or _fingerprint(arguments.model_path, arguments.load_format),
        "compute_dtype": arguments.dtype,
        "kv_dtype": f"{pool.dtype} {arguments.kv_cache_dtype}",
        "pool": type(pool).__name__,
        **{name: getattr(pool, name, None) for name in POOL_ATTRIBUTES},
        "page_bytes": page.numel() * page.element_size(),
        "tp": f"{rank}/{config.tp_size}",
        "pp": f"{config.pp_rank}/{config.pp_size}",
        "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        "dcp": f"{config.dcp_rank}/{config.dcp_size}",
        "heads": config.tp_lcm_size,
        **{name: getattr(arguments, name, None) for name in KV_OPTIONS},
    }
    digest = hashlib.sha256(json.dumps(geometry, sort_keys=True, default=str).encode()).hexdigest()
    logger.info("dps prefix cache: shared with the tag %s; geometry: %s", digest[:16], geometry)
    return digest


def _fingerprint(model_path: str, load_format: str) -> str:
    """The fingerprint of a checkpoint. Raises NotShareable if it is not on this machine."""
    if str(load_format) == "dummy":
        raise NotShareable("the weights are random (load format dummy)")
    folder = Path(model_path)
    if not folder.is_dir():
        try:
            from huggingface_hub import snapshot_download

            folder = Path(
                snapshot_download(model_path, revision=get_server_args().revision, local_files_only=True)
            )
        except Exception as error:  # the Hub's client raises many kinds of exceptions
            raise NotShareable(
                f"the weights of {model_path} cannot be found; set `weights` in the backend's extra config"
            ) from error
    try:
        return fingerprint(folder)
    except (OSError, ValueError) as error:
        raise NotShareable(
            f"the weights cannot be identified: {error}; set `weights` in the backend's extra config"
        ) from error
