"""What determines the bytes of the running engine's pages: arguments, weights and host memory (SGLang 0.5.23)."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_server_args

from dps_sglang.arguments import check_shareable
from dps_sglang.sharing import NotShareable
from dps_sglang.storage.geometry import Geometry
from dps_sglang.weights import fingerprint

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


def engine_geometry(config: Any, pool: Any, page_bytes: int, weights: str | None = None) -> Geometry:
    """The geometry of the engine's pages. Raises NotShareable.

    config: SGLang's configuration of the storage. pool: its host memory. weights: name of the weights' revision; None
    to fingerprint the files.
    """
    arguments = get_server_args()
    check_shareable(arguments, rust_server=envs.SGLANG_RUST_SERVER.get())
    rank = "any" if config.is_mla_model else config.tp_rank  # MLA replicates KV on all ranks
    shape = {
        name: getattr(pool, name, None)
        for name in ("layer_num", "head_num", "head_dim", "storage_format_tag")
    }
    return Geometry(
        engine_version=f"sglang {version('sglang')}",
        weights=weights or _fingerprint(arguments.model_path, arguments.load_format),
        compute_dtype=str(arguments.dtype),
        kv_dtype=f"{pool.dtype} {arguments.kv_cache_dtype}",
        pool=f"{type(pool).__name__} {json.dumps(shape)}",
        layout=pool.layout,
        page_tokens=pool.page_size,
        page_bytes=page_bytes,
        shard=(
            f"tp {rank}/{config.tp_size} pp {config.pp_rank}/{config.pp_size} cp {config.attn_cp_rank}/"
            f"{config.attn_cp_size} dcp {config.dcp_rank}/{config.dcp_size} heads {config.tp_lcm_size}"
        ),
        options=json.dumps({name: str(getattr(arguments, name, None)) for name in KV_OPTIONS}),
    )


def speculates_with_draft_model() -> bool:
    """Whether the engine has a draft model, which has KV of its own."""
    algorithm = get_server_args().speculative_algorithm
    return algorithm is not None and algorithm.upper() != "NGRAM"


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
