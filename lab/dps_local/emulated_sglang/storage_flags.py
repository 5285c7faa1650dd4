"""The storage level of the prefix cache, as SGLang's flags for Mooncake configure it."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from dps_engines.sglang.prefix_cache import GEOMETRY, GREEDY, SHARED
from dps_gateway.routing.decision import FETCH_THRESHOLD_TOKENS
from dps_local.emulated_sglang.settings import VERSION
from dps_local.emulated_sglang.storage import StorageOptions

EMULATED = {"hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "timeout"}
"""The only value of these flags that is emulated; it is the operator's."""


def storage_options(options: argparse.Namespace) -> StorageOptions | None:
    """The storage options; None if the engine stores no pages. Raises ValueError if a flag's value is invalid."""
    flags, directory = vars(options), options.emulate_storage_directory
    enabled = flags.get("enable_hierarchical_cache") or flags.get("enable_hicache")
    algorithm = options.speculative_algorithm or GREEDY
    mooncake = enabled and flags.get("hicache_storage_backend") == "mooncake"
    if directory is None or not mooncake or (algorithm, algorithm) not in SHARED:
        return None
    for name, only in EMULATED.items():
        if (value := flags.get(name, only)) != only:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not emulated; use {only}")
    extra = _extra_config(flags.get("hicache_storage_backend_extra_config"))
    size = page_tokens(options)
    names = [name.removeprefix("--").replace("-", "_") for name in (*GEOMETRY, "--tp-size")]
    # Engines share pages only if all of these are equal.
    geometry = [VERSION, options.model_path, *map(flags.get, names), size, extra.get("extra_backend_tag")]
    return StorageOptions(
        folder=directory / hashlib.blake2b(repr(geometry).encode(), digest_size=8).hexdigest(),
        page_tokens=size,
        draft_refill=algorithm == "STANDALONE",
        threshold_tokens=extra.get("prefetch_threshold", FETCH_THRESHOLD_TOKENS),
        tokens_per_second=options.emulate_storage_tokens_per_second,
        timeout_seconds=extra.get("prefetch_timeout_base", StorageOptions.timeout_seconds),
        timeout_seconds_per_1024_tokens=extra.get(
            "prefetch_timeout_per_ki_token", StorageOptions.timeout_seconds_per_1024_tokens
        ),
    )


def page_tokens(options: argparse.Namespace) -> int:
    """The value of --page-size. Raises ValueError unless it is a positive integer."""
    size = vars(options).get("page_size", 1)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"--page-size {size} must be a positive integer")
    return size


def _extra_config(text: str | None) -> dict[str, Any]:
    """The object in --hicache-storage-backend-extra-config: JSON, or @FILE. Raises ValueError."""
    try:
        content = Path(text[1:]).read_text() if text and text.startswith("@") else text
        config = json.loads(content) if content else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"--hicache-storage-backend-extra-config {text}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--hicache-storage-backend-extra-config {text}: not a JSON object")
    return config
