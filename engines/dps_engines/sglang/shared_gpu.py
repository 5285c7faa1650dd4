"""GPU memory of two SGLang engines on one GPU whose memory they share, as with time-slicing.

Both KV caches get the same number of tokens. SGLang takes --mem-fraction-static of the memory that is free when it
starts, so the fraction alone would give an engine a different share after a restart; --max-total-tokens fixes the size
of the KV cache. The sizes and the reserves are those of `memory.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dps_engines.launch import EngineError, Launch
from dps_engines.models import GIB, MODELS
from dps_engines.sglang.memory import limits_memory, reserve

MIN_TOKENS: Final = 16_384
"""A KV cache for fewer tokens is refused: it would not hold the prompts of a few sessions."""
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


def _sizes(launch: Launch) -> _Sizes | None:
    """None if a model is not known."""
    speculation = launch.speculation
    names = [
        launch.model,
        *([speculation.draft_model or ""] if speculation and speculation.draft_model else []),
    ]
    models = [MODELS[name] for name in names if name in MODELS]
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
    fixed = own.weights + own.reserve + beside.weights + beside.reserve
    tokens = (launch.gpu_bytes - fixed) // (own.kv_per_token + beside.kv_per_token)
    tokens -= tokens % ROUNDING
    if tokens < MIN_TOKENS:
        parts = {
            "weights": own.weights + beside.weights,
            "activations and CUDA graphs": own.reserve + beside.reserve,
            f"KV caches of {MIN_TOKENS} tokens": MIN_TOKENS * (own.kv_per_token + beside.kv_per_token),
        }
        total = " + ".join(f"{size / GIB:.1f} GiB ({name})" for name, size in parts.items())
        raise EngineError(
            f"spec.placement: both engines need {total} = {sum(parts.values()) / GIB:.1f} GiB, but the GPU has "
            f"{launch.gpu_bytes / GIB:.1f} GiB; use smaller models, or placement SeparateGPUs"
        )
    free = launch.gpu_bytes - beside.static(tokens) - beside.reserve
    fraction = math.ceil(own.static(tokens) / free * 100) / 100
    return ["--mem-fraction-static", f"{fraction:.2f}", "--max-total-tokens", str(tokens)]
