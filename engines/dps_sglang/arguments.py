"""The arguments with which an engine cannot share pages (SGLang 0.5.23)."""

from typing import Any

from dps_sglang.sharing import NotShareable

ALGORITHMS = frozenset({"NGRAM", "STANDALONE"})
"""Speculative algorithms whose pages are those of an engine without speculation.

EAGLE and related algorithms have draft models that continue the target model's hidden states, so `draft_refill` cannot
compute their KV for a fetched prefix.
"""


def check_shareable(arguments: Any, *, rust_server: bool) -> None:
    """Raises NotShareable if an engine with these arguments must share no pages.

    arguments: SGLang's ServerArgs. rust_server: whether SGLANG_RUST_SERVER is set.
    """
    if arguments.enable_lora:
        raise NotShareable("LoRA adapters are enabled")
    algorithm = arguments.speculative_algorithm
    if algorithm is not None and algorithm.upper() not in ALGORITHMS:
        raise NotShareable(f"{algorithm} engines require the KV of their draft models, which is not shared")
    if arguments.tokenizer_worker_num > 1 or rust_server:
        raise NotShareable(
            "SGLang loads no plugins in the processes that serve HTTP, so tenants would share prefixes on "
            "/v1/messages; remove --tokenizer-worker-num and SGLANG_RUST_SERVER"
        )
