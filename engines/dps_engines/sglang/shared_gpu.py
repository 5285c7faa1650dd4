"""GPU memory of two SGLang engines on one GPU.

With time-slicing they share the memory, and both KV caches get the same number of tokens. With MPS each engine can
allocate a part of it, and its KV cache takes what is left of that. SGLang takes --mem-fraction-static of the memory
that is free when it starts, so the fraction alone would give an engine a different share after a restart;
--max-total-tokens fixes the size of the KV cache. With MPS only the engine's part counts as free, but CUDA graphs and
activations are sized for the whole GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dps_engines.launch import EngineError, Launch
from dps_engines.model_fit import GIB, MIN_TOKENS, gib
from dps_engines.sglang.memory import MIB, limits_memory

ROUNDING: Final = 1024


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one engine in bytes; a standalone draft model is included."""

    weights: int
    kv_per_token: int
    reserve: int

    def static(self, tokens: int) -> int:
        """The weights and a KV cache for this number of tokens."""
        return self.weights + tokens * self.kv_per_token


def reserve(gpu_bytes: int, tensor_parallel: int) -> int:
    """The memory for activations and CUDA graphs on a GPU of 35 to 90 GiB, as earlier versions of SGLang reserve it.

    SGLang 0.5.23 measures it instead, which is not possible before both engines have started.
    """
    few = tensor_parallel < 4
    prefill_tokens, graph_batch = (8192, 256 if few else 512)
    if gpu_bytes < 60 * GIB:
        prefill_tokens, graph_batch = (4096, 32 if few else 160)
    mebibytes = 512 + prefill_tokens * 3 // 2 + graph_batch * 2 + tensor_parallel * 128
    if gpu_bytes > 60 * GIB:
        mebibytes = max(mebibytes, 10 * 1024)
    return mebibytes * MIB


def _sizes(launch: Launch) -> _Sizes | None:
    """None if a model is not known."""
    speculation = launch.speculation
    names = [
        launch.model,
        *([speculation.draft_model or ""] if speculation and speculation.draft_model else []),
    ]
    models = [launch.models[name] for name in names if name in launch.models]
    if len(models) < len(names) or launch.gpu_bytes is None:
        return None
    return _Sizes(
        sum(model.weights(1) for model in models),
        sum(model.kv_per_token(1) for model in models),
        reserve(launch.gpu_bytes, 1),
    )


def shared_arguments(launch: Launch, other: Launch, arguments: Sequence[str]) -> list[str]:
    """The flags that limit the memory of `launch` beside `other` on a GPU of `launch.gpu_bytes`.

    arguments: those of the user, which take precedence. Raises EngineError if the engines do not fit, or if the size of
    a model is not known.
    """
    if limits_memory(arguments):
        return []
    own, beside = _sizes(launch), _sizes(other)
    if launch.gpu_bytes is None or own is None or beside is None:
        raise EngineError(
            "spec.placement: the memory of the models or of the GPU is not known, so it cannot be divided; set "
            "--mem-fraction-static and --max-total-tokens in the args of both pools"
        )
    if launch.memory_limit is not None:
        engines, available = [own], launch.memory_limit
    else:
        engines, available = [own, beside], launch.gpu_bytes
    tokens = _tokens(engines, available)
    free = available - sum(one.static(tokens) + one.reserve for one in engines[1:])
    fraction = math.ceil(own.static(tokens) / free * 100) / 100
    return ["--mem-fraction-static", f"{fraction:.2f}", "--max-total-tokens", str(tokens)]


def _tokens(engines: Sequence[_Sizes], available: int) -> int:
    """The tokens for which the KV cache of each engine has space. available: memory for all of them, in bytes.

    Raises EngineError if they are too few.
    """
    fixed = sum(one.weights + one.reserve for one in engines)
    per_token = sum(one.kv_per_token for one in engines)
    tokens = (available - fixed) // per_token
    tokens -= tokens % ROUNDING
    if tokens < MIN_TOKENS:
        parts = {
            "weights": sum(one.weights for one in engines),
            "activations and CUDA graphs": sum(one.reserve for one in engines),
            f"KV caches of {MIN_TOKENS} tokens": MIN_TOKENS * per_token,
        }
        total = " + ".join(f"{gib(size)} ({name})" for name, size in parts.items())
        both = len(engines) > 1
        raise EngineError(
            f"spec.placement: {'both engines need' if both else 'the engine needs'} {total} = "
            f"{gib(sum(parts.values()))}, but {'the GPU has' if both else 'its part of the GPU has'} "
            f"{gib(available)}; use smaller models, or placement SeparateGPUs"
        )
    return tokens
