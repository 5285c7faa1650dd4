"""Sizes of models, from a table and from their config.json.

Source of the table: the published configurations of the models. All sizes are those of one GPU, in bytes; weights and
KV cache have 16 bits per value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

BYTES_PER_VALUE: Final = 2
MAX_PARAMETERS: Final = 10**13
"""Above this, a configuration is considered invalid."""


class UnknownSizeError(ValueError):
    """The sizes of a model cannot be computed from its configuration; the message says why."""


@dataclass(frozen=True)
class ModelFacts:
    """What the memory of a model and its tensor parallelism depend on. heads: attention heads for queries.

    intermediate_size: size of the hidden layer of an MLP; None if it is not known.
    """

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int | None
    head_size: int = 128

    def weights(self, tensor_parallel: int) -> int:
        """Size of the weights on one of the GPUs."""
        return self.parameters * BYTES_PER_VALUE // tensor_parallel

    def kv_per_token(self, tensor_parallel: int) -> int:
        """Size of the keys and values of one token. KV heads are replicated if there are fewer than GPUs."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * heads * self.head_size * BYTES_PER_VALUE

    def splits_heads(self, tensor_parallel: int) -> bool:
        """Whether every GPU gets the same number of heads, as SGLang and vLLM require. See kv_per_token."""
        more, fewer = max(self.kv_heads, tensor_parallel), min(self.kv_heads, tensor_parallel)
        return self.heads % tensor_parallel == 0 and more % fewer == 0

    def splits(self, tensor_parallel: int) -> bool:
        """Whether every GPU gets the same part of the heads and, if its size is known, of the MLP."""
        return self.splits_heads(tensor_parallel) and (self.intermediate_size or 0) % tensor_parallel == 0


_QWEN_2_5: Final = {
    "0.5B": ModelFacts(494_032_768, 24, 14, 2, 4864, 64),
    "1.5B": ModelFacts(1_543_714_304, 28, 12, 2, 8960),
    "3B": ModelFacts(3_085_938_688, 36, 16, 2, 11008),
    "7B": ModelFacts(7_615_616_512, 28, 28, 4, 18944),
    "14B": ModelFacts(14_770_033_664, 48, 40, 8, 13824),
    "32B": ModelFacts(32_763_876_352, 64, 40, 8, 27648),
    "72B": ModelFacts(72_706_203_648, 80, 64, 8, 29568),
}
_QWEN_3: Final = {
    "0.6B": ModelFacts(596_049_920, 28, 16, 8, 3072),
    "1.7B": ModelFacts(1_720_574_976, 28, 16, 8, 6144),
    "4B": ModelFacts(4_022_468_096, 36, 32, 8, 9728),
    "8B": ModelFacts(8_190_735_360, 36, 32, 8, 12288),
    "14B": ModelFacts(14_768_307_200, 40, 40, 8, 17408),
    "32B": ModelFacts(32_762_123_264, 64, 64, 8, 25600),
}
_LLAMA_3: Final = {
    "1B": ModelFacts(1_235_814_400, 16, 32, 8, 8192, 64),
    "3B": ModelFacts(3_212_749_824, 28, 24, 8, 8192),
    "8B": ModelFacts(8_030_261_248, 32, 32, 8, 14336),
    "70B": ModelFacts(70_553_706_496, 80, 64, 8, 28672),
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
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ModelFacts(1_777_088_000, 28, 12, 2, 8960),
    **{f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}": _QWEN_2_5[size] for size in ("7B", "14B", "32B")},
    **{f"deepseek-ai/DeepSeek-R1-Distill-Llama-{size}": _LLAMA_3[size] for size in ("8B", "70B")},
    "mistralai/Mistral-7B-Instruct-v0.3": ModelFacts(7_248_023_552, 32, 32, 8, 14336),
}
"""Models whose sizes are known without their configuration."""


@dataclass(frozen=True)
class _Architecture:
    """A decoder with grouped-query attention and a gated MLP, without mixture of experts.

    attention_bias: of the query, key and value projections; None if the configuration contains it, and then the output
    projection has one too. query_norm: whether queries and keys are normalised.
    """

    attention_bias: bool | None
    query_norm: bool = False


_ARCHITECTURES: Final = {
    "LlamaForCausalLM": _Architecture(attention_bias=None),
    "MistralForCausalLM": _Architecture(attention_bias=False),
    "Qwen2ForCausalLM": _Architecture(attention_bias=True),
    "Qwen3ForCausalLM": _Architecture(attention_bias=None, query_norm=True),
}
"""Source: the implementations in Transformers."""


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    """The sizes of the model with this config.json. Raises UnknownSizeError."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    architecture = _ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise UnknownSizeError(
            f"only the architectures {', '.join(_ARCHITECTURES)} are known, not {str(name)[:100]}"
        )
    if config.get("quantization_config") is not None:
        raise UnknownSizeError("its weights are quantized")
    hidden, layers = _positive(config, "hidden_size"), _positive(config, "num_hidden_layers")
    heads = _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    head_size = _positive(config, "head_dim", hidden // heads)
    queries, keys = heads * head_size, kv_heads * head_size
    attention = hidden * (2 * queries + 2 * keys)
    if architecture.attention_bias:
        attention += queries + 2 * keys
    elif architecture.attention_bias is None and config.get("attention_bias") is True:
        attention += queries + 2 * keys + hidden
    if architecture.query_norm:
        attention += 2 * head_size
    intermediate = _positive(config, "intermediate_size")
    mlp = 3 * hidden * intermediate
    if config.get("mlp_bias") is True:
        mlp += 2 * intermediate + hidden
    norms = 2 * hidden
    embeddings = (
        _positive(config, "vocab_size") * hidden * (1 if config.get("tie_word_embeddings") is True else 2)
    )
    parameters = layers * (attention + mlp + norms) + embeddings + hidden
    if parameters > MAX_PARAMETERS:
        raise UnknownSizeError(f"its configuration has more than {MAX_PARAMETERS} parameters")
    return ModelFacts(parameters, layers, heads, kv_heads, intermediate, head_size)


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A positive number. default: if the field is missing or null."""
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_PARAMETERS:
        raise UnknownSizeError(f"{field} of its configuration is not a positive integer")
    return value
