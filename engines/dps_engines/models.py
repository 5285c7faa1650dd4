"""Sizes of models, and whether they can be split across the GPUs and fit into them.

Source: the published configurations of the models. All sizes are those of one GPU, in bytes; weights and KV cache have
16 bits per value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dps_engines.launch import TENSOR_PARALLEL_LIMITS, EngineError, Launch

GIB: Final = 2**30
BYTES_PER_VALUE: Final = 2


@dataclass(frozen=True)
class ModelFacts:
    """What the memory of a model and its tensor parallelism depend on. heads: attention heads for queries."""

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int = 128

    def weights(self, tensor_parallel: int) -> int:
        """Size of the weights on one of the GPUs."""
        return self.parameters * BYTES_PER_VALUE // tensor_parallel

    def kv_per_token(self, tensor_parallel: int) -> int:
        """Size of the keys and values of one token. KV heads are replicated if there are fewer than GPUs."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * heads * self.head_size * BYTES_PER_VALUE

    def splits(self, tensor_parallel: int) -> bool:
        """Whether every GPU gets the same number of heads, as SGLang and vLLM require. See kv_per_token."""
        more, fewer = max(self.kv_heads, tensor_parallel), min(self.kv_heads, tensor_parallel)
        return self.heads % tensor_parallel == 0 and more % fewer == 0


_QWEN_2_5: Final = {
    "0.5B": ModelFacts(494_032_768, 24, 14, 2, 64),
    "1.5B": ModelFacts(1_543_714_304, 28, 12, 2),
    "3B": ModelFacts(3_085_938_688, 36, 16, 2),
    "7B": ModelFacts(7_615_616_512, 28, 28, 4),
    "14B": ModelFacts(14_770_033_664, 48, 40, 8),
    "32B": ModelFacts(32_763_876_352, 64, 40, 8),
    "72B": ModelFacts(72_706_203_648, 80, 64, 8),
}
_QWEN_3: Final = {
    "0.6B": ModelFacts(596_049_920, 28, 16, 8),
    "1.7B": ModelFacts(1_720_574_976, 28, 16, 8),
    "4B": ModelFacts(4_022_468_096, 36, 32, 8),
    "8B": ModelFacts(8_190_735_360, 36, 32, 8),
    "14B": ModelFacts(14_768_307_200, 40, 40, 8),
    "32B": ModelFacts(32_762_123_264, 64, 64, 8),
}
_LLAMA_3: Final = {
    "1B": ModelFacts(1_235_814_400, 16, 32, 8, 64),
    "3B": ModelFacts(3_212_749_824, 28, 24, 8),
    "8B": ModelFacts(8_030_261_248, 32, 32, 8),
    "70B": ModelFacts(70_553_706_496, 80, 64, 8),
}

MODELS: Final[Mapping[str, ModelFacts]] = {
    **{f"Qwen/Qwen2.5-{size}-Instruct": facts for size, facts in _QWEN_2_5.items()},
    **{
        f"Qwen/Qwen2.5-Coder-{size}-Instruct": _QWEN_2_5[size]
        for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")
    },
    **{f"Qwen/Qwen3-{size}": facts for size, facts in _QWEN_3.items()},
    **{f"meta-llama/Llama-3.1-{size}-Instruct": _LLAMA_3[size] for size in ("8B", "70B")},
    **{f"meta-llama/Llama-3.2-{size}-Instruct": _LLAMA_3[size] for size in ("1B", "3B")},
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_3["70B"],
    # Its embeddings are not tied, unlike those of Qwen2.5-1.5B.
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ModelFacts(1_777_088_000, 28, 12, 2),
    **{f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}": _QWEN_2_5[size] for size in ("7B", "14B", "32B")},
    **{f"deepseek-ai/DeepSeek-R1-Distill-Llama-{size}": _LLAMA_3[size] for size in ("8B", "70B")},
    "mistralai/Mistral-7B-Instruct-v0.3": ModelFacts(7_248_023_552, 32, 32, 8),
}
"""Models whose memory is computed. Nothing is assumed about other models."""


def known_models(launch: Launch) -> dict[str, ModelFacts]:
    """The model and the draft model, by name; a model that is not known is left out."""
    found = {}
    if launch.model in MODELS:
        found[launch.model] = MODELS[launch.model]
    draft = launch.speculation.draft_model if launch.speculation else None
    if draft is not None and draft in MODELS:
        found[f"draft {draft}"] = MODELS[draft]
    return found


def weights(launch: Launch) -> dict[str, int]:
    """The weights of the known models, by name."""
    return {name: model.weights(launch.tensor_parallel) for name, model in known_models(launch).items()}


def check_heads(launch: Launch) -> None:
    """Raises EngineError if the heads of a model cannot be divided among the GPUs. The draft has the target's GPUs."""
    models = known_models(launch)
    for name, model in models.items():
        if not model.splits(launch.tensor_parallel):
            possible = [
                str(gpus)
                for gpus in range(TENSOR_PARALLEL_LIMITS[0], TENSOR_PARALLEL_LIMITS[1] + 1)
                if all(one.splits(gpus) for one in models.values())
            ]
            raise EngineError(
                f"spec.engine.tensorParallel: the {model.heads} attention heads and {model.kv_heads} KV heads of "
                f"{name} cannot be divided among {launch.tensor_parallel} GPUs; choose one of {', '.join(possible)}"
            )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def too_large(launch: Launch, parts: Mapping[str, int], gpu_bytes: int, remedy: str) -> EngineError:
    """The error for parts that do not fit together. remedy: what else the user can do, for this engine."""
    total = " + ".join(f"{_gib(size)} ({name})" for name, size in parts.items())
    return EngineError(
        f"spec.engine.tensorParallel: {total} = {_gib(sum(parts.values()))} per GPU do not fit into "
        f"{_gib(gpu_bytes)}, with 16-bit weights and tensorParallel {launch.tensor_parallel}; increase "
        f"tensorParallel, use a smaller model, or {remedy}"
    )


def check_weights(launch: Launch, gpu_bytes: int, remedy: str) -> None:
    """Raises EngineError if the weights alone do not fit. remedy: see `too_large`."""
    parts = weights(launch)
    if sum(parts.values()) >= gpu_bytes:
        raise too_large(launch, parts, gpu_bytes, remedy)
