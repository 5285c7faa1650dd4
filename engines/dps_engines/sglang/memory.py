"""GPU memory of SGLang engines: whether models fit, and the --mem-fraction-static that leaves room for a draft model.

Sources: the published configurations of the models, and `_handle_gpu_memory_settings` and `profile_max_num_token` of
SGLang 0.5.8.post1. All sizes are those of one GPU, in bytes; weights and KV cache have 16 bits per value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dps_engines.launch import EngineError, Launch

MIB: Final = 2**20
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

COUNTS_THE_DRAFT: Final = (0, 5, 23)
"""A version whose own default leaves room for the KV cache of a draft model. 0.5.8.post1 reserves 6 GiB for any draft
model, however many tokens its KV cache has to hold."""

DECIDES: Final = (
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
    "--pp-size",
    "--pipeline-parallel-size",
)
"""Flags with which a user decides about memory, or which change the sizes computed here."""


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


def decided(arguments: Sequence[str]) -> bool:
    """Whether a user's arguments contain, or abbreviate, one of the flags of DECIDES."""
    names = [argument.split("=", 1)[0] for argument in arguments if len(argument) > len("--")]
    return any(flag.startswith(name) for name in names if name.startswith("--") for flag in DECIDES)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _too_large(launch: Launch, parts: Mapping[str, int], gpu_bytes: int) -> EngineError:
    total = " + ".join(f"{_gib(size)} ({name})" for name, size in parts.items())
    return EngineError(
        f"spec.engine.tensorParallel: {total} = {_gib(sum(parts.values()))} per GPU do not fit into "
        f"{_gib(gpu_bytes)}, with 16-bit weights and tensorParallel {launch.tensor_parallel}; increase "
        "tensorParallel, use a smaller model, or set --quantization or --mem-fraction-static in args"
    )


def memory_arguments(launch: Launch, version: tuple[int, ...], arguments: Sequence[str]) -> list[str]:
    """The flags that limit the memory of a launch on GPUs of `launch.gpu_bytes`; none where SGLang's default is right.

    arguments: those of the user, which take precedence. Raises EngineError if the models cannot fit.
    """
    gpu_bytes, target = launch.gpu_bytes, MODELS.get(launch.model)
    if gpu_bytes is None or target is None or decided(arguments):
        return []
    speculation, ranks = launch.speculation, launch.tensor_parallel
    draft_name = (speculation.draft_model or "") if speculation else ""
    draft = MODELS.get(draft_name)
    parts = {launch.model: target.weights(ranks)}
    if draft is not None:
        parts[f"draft {draft_name}"] = draft.weights(ranks)
    if sum(parts.values()) >= gpu_bytes:
        raise _too_large(launch, parts, gpu_bytes)
    standalone = speculation is not None and speculation.algorithm == "Standalone"
    if draft is None or not standalone or version >= COUNTS_THE_DRAFT:
        return []
    fraction = fraction_beside_draft(target, draft, gpu_bytes, ranks)
    if fraction * gpu_bytes <= target.weights(ranks):
        parts["activations and CUDA graphs"] = reserve(gpu_bytes, ranks)
        raise _too_large(launch, parts, gpu_bytes)
    return ["--mem-fraction-static", f"{fraction:.2f}"]
