"""GPU memory of SGLang engines."""

from collections.abc import Sequence
from typing import Final

MIB: Final = 2**20

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
"""Flags that limit memory, or that change the sizes of weights and KV caches."""


def left_free(tensor_parallel: int) -> int:
    """The memory of a GPU that SGLang 0.5.23 leaves free. KV caches get what weights and CUDA graphs leave."""
    return (1536 + tensor_parallel * 128) * MIB


def limits_memory(arguments: Sequence[str]) -> bool:
    """Whether a user's arguments contain, or abbreviate, one of MEMORY_FLAGS."""
    names = [argument.split("=", 1)[0] for argument in arguments if len(argument) > len("--")]
    return any(flag.startswith(name) for name in names if name.startswith("--") for flag in MEMORY_FLAGS)
