"""GPUs and models for the time model. Sources: the vendors' data sheets and the models' published configurations."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Gpu:
    """One GPU: peak memory bandwidth (bytes/s), peak dense BF16 compute (FLOP/s) and memory (bytes)."""

    name: str
    bytes_per_second: float
    flops: float
    memory_bytes: float


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer in BF16.

    `parameters` counts everything that is in memory; `active_parameters` what one forward pass reads and
    multiplies with, so an input embedding that is not shared with the output layer is not counted.
    """

    name: str
    parameters: float
    active_parameters: float
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int

    @property
    def weight_bytes(self) -> float:
        """Memory that the weights take."""
        return 2 * self.parameters

    @property
    def kv_bytes_per_token(self) -> float:
        """Size of one token's keys and values in BF16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True)
class Hardware:
    """The GPUs of one engine, its target model, and the draft model that STANDALONE speculation uses."""

    gpu: Gpu
    tensor_parallel: int
    target: Model
    draft: Model


A100: Final = Gpu("A100-80GB", 2.039e12, 312e12, 80e9)
H100: Final = Gpu("H100-80GB", 3.35e12, 989e12, 80e9)
H200: Final = Gpu("H200-141GB", 4.8e12, 989e12, 141e9)

QWEN_7B: Final = Model("Qwen2.5-7B-Instruct", 7.62e9, 7.07e9, 28, 28, 4, 128)
QWEN_1_5B: Final = Model("Qwen2.5-1.5B-Instruct", 1.54e9, 1.54e9, 28, 12, 2, 128)
LLAMA_70B: Final = Model("Llama-3.1-70B-Instruct", 70.6e9, 69.5e9, 80, 64, 8, 128)
LLAMA_1B: Final = Model("Llama-3.2-1B-Instruct", 1.24e9, 1.24e9, 16, 32, 8, 64)

HARDWARE: Final = {
    "a100-7b": Hardware(A100, 1, QWEN_7B, QWEN_1_5B),
    "h100-7b": Hardware(H100, 1, QWEN_7B, QWEN_1_5B),
    "h200-7b": Hardware(H200, 1, QWEN_7B, QWEN_1_5B),
    "a100-70b": Hardware(A100, 4, LLAMA_70B, LLAMA_1B),
    "h100-70b": Hardware(H100, 4, LLAMA_70B, LLAMA_1B),
    "h200-70b": Hardware(H200, 2, LLAMA_70B, LLAMA_1B),
}
"""What `--hardware` accepts. The 70B model spans several GPUs by tensor parallelism."""
