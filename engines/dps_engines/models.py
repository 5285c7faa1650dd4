"""Sizes of models.

Source: the published configurations of the models. All sizes are those of one GPU, in bytes; weights and
KV cache have 16 bits per value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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


_QWEN_2_5: Final = {
    "0.5B": ModelFacts(494_032_768, 24, 2, 64),
    "1.5B": ModelFacts(1_543_714_304, 28, 2),
    "3B": ModelFacts(3_085_938_688, 36, 2),
    "7B": ModelFacts(7_615_616_512, 28, 4),
    "14B": ModelFacts(14_770_033_664, 48, 8),
    "32B": ModelFacts(32_763_876_352, 64, 8),
    "72B": ModelFacts(72_706_203_648, 80, 8),
}
_QWEN_3: Final = {
    "0.6B": ModelFacts(596_049_920, 28, 8),
    "1.7B": ModelFacts(1_720_574_976, 28, 8),
    "4B": ModelFacts(4_022_468_096, 36, 8),
    "8B": ModelFacts(8_190_735_360, 36, 8),
    "14B": ModelFacts(14_768_307_200, 40, 8),
    "32B": ModelFacts(32_762_123_264, 64, 8),
}
_LLAMA_3: Final = {
    "1B": ModelFacts(1_235_814_400, 16, 8, 64),
    "3B": ModelFacts(3_212_749_824, 28, 8),
    "8B": ModelFacts(8_030_261_248, 32, 8),
    "70B": ModelFacts(70_553_706_496, 80, 8),
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
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ModelFacts(1_777_088_000, 28, 2),
    **{f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}": _QWEN_2_5[size] for size in ("7B", "14B", "32B")},
    **{f"deepseek-ai/DeepSeek-R1-Distill-Llama-{size}": _LLAMA_3[size] for size in ("8B", "70B")},
    "mistralai/Mistral-7B-Instruct-v0.3": ModelFacts(7_248_023_552, 32, 8),
}
"""Models whose sizes are known without their configuration."""
