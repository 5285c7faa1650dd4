"""GPU memory of SGLang engines: whether models fit, and the --mem-fraction-static that leaves room for a draft model.

Sources: the published configurations of the models, and SGLang's own functions, whose results for 0.5.8.post1 and
0.5.23 e2e/real_sglang/record_memory.py records. All sizes are those of one GPU, in bytes; weights and KV cache have 16
bits per value.
"""

import math
from collections.abc import Sequence
from typing import Final

from dps_engines.launch import Launch
from dps_engines.model_fit import GIB, check_weights, too_large, weights
from dps_engines.models import ModelFacts

MIB: Final = 2**20

RESERVES_FOR_DRAFT_SINCE: Final = (0, 5, 23)
"""The oldest known version whose own default leaves room for the KV cache of a draft model.

0.5.8.post1 reserves 6 GiB for any draft model, however many tokens its KV cache has to hold. 0.5.23 counts each layer
of the draft model like one of the target, which is at least the size that it has for models of one family."""

MIN_TOKENS: Final = 16_384
"""A KV cache for fewer tokens is refused: it would not hold the prompts of a few sessions."""

MEMORY_FLAGS: Final = (
    "--mem-fraction-static",
    "--max-total-tokens",
    "--dtype",
    "--kv-cache-dtype",
    "--quantization",
    "--speculative-draft-model-quantization",
    "--torchao-config",
    "--load-format",
    "--json-model-override-args",
    "--cpu-offload-gb",
)
"""Flags that limit memory, or that change the sizes computed here."""

REMEDY: Final = "set --quantization or --mem-fraction-static in args"


def reserve(gpu_bytes: int, tensor_parallel: int) -> int:
    """The memory that SGLang 0.5.8.post1 leaves free on a GPU of 35 to 90 GiB for activations and CUDA graphs."""
    few = tensor_parallel < 4
    prefill_tokens, graph_batch = (8192, 256 if few else 512)
    if gpu_bytes < 60 * GIB:
        prefill_tokens, graph_batch = (4096, 32 if few else 160)
    mebibytes = 512 + prefill_tokens * 3 // 2 + graph_batch * 2 + tensor_parallel * 128
    if gpu_bytes > 60 * GIB:
        mebibytes = max(mebibytes, 10 * 1024)
    return mebibytes * MIB


def left_free(tensor_parallel: int) -> int:
    """The memory of a GPU that SGLang 0.5.23 leaves free. KV caches get what weights and CUDA graphs leave."""
    return (1536 + tensor_parallel * 128) * MIB


def _check_kv_caches(launch: Launch, gpu_bytes: int, target: ModelFacts, draft: ModelFacts | None) -> None:
    """Raises EngineError if the KV caches of 0.5.23 are too small even without CUDA graphs, whose size is not known."""
    ranks = launch.tensor_parallel
    layers = target.layers + (draft.layers if draft else 0)
    caches = MIN_TOKENS * (target.kv_per_token(ranks) * layers // target.layers)
    parts = weights(launch) | {
        f"KV caches of {MIN_TOKENS} tokens": caches,
        "left free by SGLang": left_free(ranks),
    }
    if sum(parts.values()) > gpu_bytes:
        raise too_large(launch, parts, gpu_bytes, REMEDY)


def fraction_beside_draft(
    target: ModelFacts, draft: ModelFacts, gpu_bytes: int, tensor_parallel: int
) -> float:
    """The largest --mem-fraction-static, in hundredths, with which the draft model fits too.

    The fraction covers the target's weights and KV cache. The KV cache of the draft has the same number of tokens, and
    like its weights is allocated from the rest.
    """
    ratio = draft.kv_per_token(tensor_parallel) / target.kv_per_token(tensor_parallel)
    free = gpu_bytes - draft.weights(tensor_parallel) - reserve(gpu_bytes, tensor_parallel)
    share = (free + ratio * target.weights(tensor_parallel)) / (1 + ratio)
    return math.floor(share / gpu_bytes * 100) / 100


def limits_memory(arguments: Sequence[str]) -> bool:
    """Whether a user's arguments contain, or abbreviate, one of MEMORY_FLAGS."""
    names = [argument.split("=", 1)[0] for argument in arguments if len(argument) > len("--")]
    return any(flag.startswith(name) for name in names if name.startswith("--") for flag in MEMORY_FLAGS)


def memory_arguments(launch: Launch, version: tuple[int, ...], arguments: Sequence[str]) -> list[str]:
    """The flags that limit the memory of a launch on GPUs of `launch.gpu_bytes`; none where SGLang's default is right.

    arguments: those of the user, which take precedence. Raises EngineError if the models cannot fit.
    """
    gpu_bytes, target = launch.gpu_bytes, launch.models.get(launch.model)
    if gpu_bytes is None or target is None or limits_memory(arguments):
        return []
    check_weights(launch, gpu_bytes, REMEDY)
    speculation, ranks = launch.speculation, launch.tensor_parallel
    draft = launch.models.get((speculation.draft_model or "") if speculation else "")
    standalone = speculation is not None and speculation.algorithm == "Standalone"
    if version >= RESERVES_FOR_DRAFT_SINCE:
        _check_kv_caches(launch, gpu_bytes, target, draft)
        return []
    if draft is None or not standalone:
        return []
    fraction = fraction_beside_draft(target, draft, gpu_bytes, ranks)
    if fraction * gpu_bytes <= target.weights(ranks):
        parts = weights(launch) | {"activations and CUDA graphs": reserve(gpu_bytes, ranks)}
        raise too_large(launch, parts, gpu_bytes, REMEDY)
    return ["--mem-fraction-static", f"{fraction:.2f}"]
