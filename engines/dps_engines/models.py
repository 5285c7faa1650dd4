"""Sizes of models, and whether their weights fit into the GPUs.

Source: the published configurations of the models. All sizes are those of one GPU, in bytes; weights and KV cache have
16 bits per value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dps_engines.launch import EngineError, Launch

GIB: Final = 2**30
BYTES_PER_VALUE: Final = 2


@dataclass(frozen=True)
class ModelFacts:
    """What the memory of a model depends on."""

    parameters: int
    layers: int
    kv_heads: int
    head_size: int = 128

    def weights(self, tensor_parallel: int) -> int:
        """Size of the weights on one of the GPUs."""
        return self.parameters * BYTES_PER_VALUE // tensor_parallel

    def kv_per_token(self, tensor_parallel: int) -> int:
        """Size of the keys and values of one token. KV heads are replicated if there are fewer than GPUs."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * heads * self.head_size * BYTES_PER_VALUE


MODELS: Final[Mapping[str, ModelFacts]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": ModelFacts(494_032_768, 24, 2, 64),
    "Qwen/Qwen2.5-1.5B-Instruct": ModelFacts(1_543_714_304, 28, 2),
    "Qwen/Qwen2.5-3B-Instruct": ModelFacts(3_085_938_688, 36, 2),
    "Qwen/Qwen2.5-7B-Instruct": ModelFacts(7_615_616_512, 28, 4),
    "Qwen/Qwen2.5-14B-Instruct": ModelFacts(14_770_033_664, 48, 8),
    "Qwen/Qwen2.5-32B-Instruct": ModelFacts(32_763_876_352, 64, 8),
    "Qwen/Qwen2.5-72B-Instruct": ModelFacts(72_706_203_648, 80, 8),
    "meta-llama/Llama-3.1-8B-Instruct": ModelFacts(8_030_261_248, 32, 8),
    "meta-llama/Llama-3.1-70B-Instruct": ModelFacts(70_553_706_496, 80, 8),
    "meta-llama/Llama-3.2-1B-Instruct": ModelFacts(1_235_814_400, 16, 8, 64),
    "meta-llama/Llama-3.2-3B-Instruct": ModelFacts(3_212_749_824, 28, 8),
    "meta-llama/Llama-3.3-70B-Instruct": ModelFacts(70_553_706_496, 80, 8),
}
"""Models whose memory is computed. Nothing is assumed about other models."""


def weights(launch: Launch) -> dict[str, int]:
    """The weights of the model and of the draft model, by name; a model that is not known is left out."""
    found = {}
    if launch.model in MODELS:
        found[launch.model] = MODELS[launch.model].weights(launch.tensor_parallel)
    draft = launch.speculation.draft_model if launch.speculation else None
    if draft is not None and draft in MODELS:
        found[f"draft {draft}"] = MODELS[draft].weights(launch.tensor_parallel)
    return found


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
