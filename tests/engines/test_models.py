"""The sizes of models, computed from their configurations."""

from typing import Any

import pytest

from dps_engines.models import MODELS, ModelFacts, UnknownSizeError, facts_of


def config(architecture: str, *sizes: int, tied: bool = False, **other: Any) -> dict[str, Any]:
    """config.json of a model. sizes: hidden size, layers, heads, KV heads, size of the MLP, and of the vocabulary."""
    fields = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "tie_word_embeddings": tied,
        **dict(zip(fields, sizes, strict=True)),
        **other,
    }


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": config("Qwen2", 896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B-Instruct": config("Qwen2", 1536, 28, 12, 2, 8960, 151936, tied=True),
    "Qwen/Qwen2.5-3B-Instruct": config("Qwen2", 2048, 36, 16, 2, 11008, 151936, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": config("Qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Qwen/Qwen2.5-14B-Instruct": config("Qwen2", 5120, 48, 40, 8, 13824, 152064),
    "Qwen/Qwen2.5-32B-Instruct": config("Qwen2", 5120, 64, 40, 8, 27648, 152064),
    "Qwen/Qwen2.5-72B-Instruct": config("Qwen2", 8192, 80, 64, 8, 29568, 152064),
    "Qwen/Qwen3-0.6B": config("Qwen3", 1024, 28, 16, 8, 3072, 151936, tied=True, head_dim=128),
    "Qwen/Qwen3-8B": config("Qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "Qwen/Qwen3-32B": config("Qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128, attention_bias=False),
    "meta-llama/Llama-3.2-1B-Instruct": config(
        "Llama", 2048, 16, 32, 8, 8192, 128256, tied=True, head_dim=64
    ),
    "meta-llama/Llama-3.1-8B-Instruct": config("Llama", 4096, 32, 32, 8, 14336, 128256),
    "meta-llama/Llama-3.1-70B-Instruct": config("Llama", 8192, 80, 64, 8, 28672, 128256),
    "mistralai/Mistral-7B-Instruct-v0.3": config("Mistral", 4096, 32, 32, 8, 14336, 32768, head_dim=None),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": config("Qwen2", 1536, 28, 12, 2, 8960, 151936),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_computed_from_a_published_configuration_are_those_of_the_table(name: str) -> None:
    assert facts_of(PUBLISHED[name]) == MODELS[name]


SMALL = config("Llama", 8, 2, 4, 2, 16, 10)
PROJECTIONS = 8 * (8 + 4 + 4 + 8)
PARAMETERS = 2 * (PROJECTIONS + 3 * 8 * 16 + 2 * 8) + 2 * 10 * 8 + 8
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "without biases": ({}, PARAMETERS),
    "with biases of the attention": ({"attention_bias": True}, PARAMETERS + 2 * (8 + 4 + 4 + 8)),
    "with biases of the MLP": ({"mlp_bias": True}, PARAMETERS + 2 * (16 + 16 + 8)),
    "with tied embeddings": ({"tie_word_embeddings": True}, PARAMETERS - 10 * 8),
}


@pytest.mark.parametrize(("changed", "parameters"), VARIANTS.values(), ids=VARIANTS.keys())
def test_parameters_of_a_variant(changed: dict[str, Any], parameters: int) -> None:
    assert facts_of({**SMALL, **changed}) == ModelFacts(parameters, 2, 4, 2, 16, 2)


def test_model_without_a_number_of_kv_heads_has_one_for_each_head() -> None:
    assert facts_of({**SMALL, "num_key_value_heads": None}).kv_heads == 4


KNOWN_ARCHITECTURES = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
ARCHITECTURES = f"only the architectures {KNOWN_ARCHITECTURES} are known, not "
UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "mixture of experts": (
        {"architectures": ["MixtralForCausalLM"]},
        f"{ARCHITECTURES}MixtralForCausalLM",
    ),
    "no architecture": ({"architectures": []}, f"{ARCHITECTURES}None"),
    "architectures of another type": ({"architectures": [{}]}, f"{ARCHITECTURES}{{}}"),
    "quantized": ({"quantization_config": {"bits": 4}}, "its weights are quantized"),
    "a size of another type": (
        {"hidden_size": "8"},
        "hidden_size of its configuration is not a positive integer",
    ),
    "a size that is not a number": (
        {"vocab_size": True},
        "vocab_size of its configuration is not a positive integer",
    ),
    "a size of zero": (
        {"num_attention_heads": 0},
        "num_attention_heads of its configuration is not a positive integer",
    ),
    "more heads than values": (
        {"num_attention_heads": 16},
        "head_dim of its configuration is not a positive integer",
    ),
    "a missing size": (
        {"intermediate_size": None},
        "intermediate_size of its configuration is not a positive integer",
    ),
    "too many parameters": (
        {"hidden_size": 10**6, "intermediate_size": 10**8},
        "its configuration has more than 10000000000000 parameters",
    ),
}


@pytest.mark.parametrize(("changed", "message"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_sizes_that_cannot_be_computed_are_unknown(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownSizeError) as unknown:
        facts_of({**SMALL, **changed})
    assert str(unknown.value) == message
