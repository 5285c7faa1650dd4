"""The GPU memory of SGLang engines, compared with SGLang's own arithmetic (e2e/real_sglang/record_memory.py)."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dps_engines.launch import Algorithm, EngineError, Launch, Speculation
from dps_engines.model_fit import GIB
from dps_engines.models import MODELS
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.memory import (
    MIB,
    MIN_TOKENS,
    fraction_beside_draft,
    left_free,
    limits_memory,
    reserve,
)
from dps_engines.sglang.runtime import DEFAULT_VERSION
from dps_testkit.paths import ROOT

SGLANG = RUNTIMES["SGLang"]
A100_80GB, A100_40GB = 80 * GIB, 40 * GIB
RECORDED: dict[str, Any] = json.loads((ROOT / "tests/engines/fixtures/sglang-memory.json").read_text())
FAMILIES = (
    "Qwen/Qwen2.5-",
    "Qwen/Qwen3-",
    "meta-llama/Llama-3",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-",
    "mistralai/Mistral-7B-",
)
"""How the names of models begin that have the same tokens, and therefore can draft for each other."""
DRAFTS = [
    (target, draft)
    for family in FAMILIES
    for target, draft in product(MODELS, repeat=2)
    if target.startswith(family)
    and draft.startswith(family)
    and MODELS[draft].parameters < MODELS[target].parameters
]
"""Models, each with the smaller ones of its family."""
SEVEN, ONE_AND_A_HALF = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"


def launch(model: str = SEVEN, draft: str | None = ONE_AND_A_HALF, **fields: Any) -> Launch:
    algorithm: Algorithm = fields.pop("algorithm", "Standalone")
    speculation = Speculation(algorithm, draft) if draft else None
    return Launch(model, "m", 30000, speculation=speculation, **({"gpu_bytes": A100_80GB} | fields))


def test_reserve_is_that_of_0_5_8_post1() -> None:
    """For a draft it adds a fixed size to this reserve. It rounds the fraction to three digits."""
    added = {None: 0, "NGRAM": 0, "STANDALONE": 6 * GIB, "EAGLE3": 2 * GIB}
    recorded = RECORDED["fractions"]["0.5.8.post1"]
    assert len(recorded) == 32
    for entry in recorded:
        gpu_bytes = entry["gpu_mib"] * MIB
        reserved = reserve(gpu_bytes, entry["tensor_parallel"]) + added[entry["algorithm"]]
        assert round((gpu_bytes - reserved) / gpu_bytes, 3) == entry["fraction"], entry


def draft_space(gpu_bytes: int, target: str, draft: str, ranks: int, fraction: float) -> float:
    """What remains of a GPU for everything else, in bytes, if 0.5.8.post1 uses this fraction for the target."""
    first, second = MODELS[target], MODELS[draft]
    tokens = (fraction * gpu_bytes - first.weights(ranks)) / first.kv_per_token(ranks)
    return (1 - fraction) * gpu_bytes - second.weights(ranks) - tokens * second.kv_per_token(ranks)


def test_default_of_0_5_8_post1_does_not_fit_the_default_pair() -> None:
    (fraction,) = [
        entry["fraction"]
        for entry in RECORDED["fractions"]["0.5.8.post1"]
        if (entry["gpu_mib"], entry["tensor_parallel"], entry["algorithm"]) == (80 * 1024, 1, "STANDALONE")
    ]
    assert draft_space(A100_80GB, SEVEN, ONE_AND_A_HALF, 1, fraction) < -6 * GIB
    ours = fraction_beside_draft(MODELS[SEVEN], MODELS[ONE_AND_A_HALF], A100_80GB, 1)
    assert draft_space(A100_80GB, SEVEN, ONE_AND_A_HALF, 1, ours) >= reserve(A100_80GB, 1)


def test_default_version_counts_a_drafts_layers_at_the_size_of_the_targets() -> None:
    assert DEFAULT_VERSION == "0.5.23"
    for entry in RECORDED["cells_of_0.5.23"]:
        own, added = entry["bytes"], entry["with_draft"] - entry["bytes"]
        assert added == own * entry["draft_layers"] // entry["layers"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_reserve_of_the_default_version_is_enough_for_every_draft_model(ranks: int) -> None:
    assert len(DRAFTS) > 20
    assert all(model.startswith(FAMILIES) for model in MODELS)
    for target, draft in DRAFTS:
        first, second = MODELS[target], MODELS[draft]
        counted = first.kv_per_token(ranks) * second.layers // first.layers
        assert second.kv_per_token(ranks) <= counted, (target, draft)


def test_default_version_leaves_a_share_of_the_memory_free_whatever_the_algorithm() -> None:
    """It captures CUDA graphs and loads both models before it sizes the KV caches, so the share is small."""
    by_set_up: dict[tuple[int, int], set[float]] = {}
    for entry in RECORDED["fractions"]["0.5.23"]:
        by_set_up.setdefault((entry["gpu_mib"], entry["tensor_parallel"]), set()).add(entry["fraction"])
    assert {len(fractions) for fractions in by_set_up.values()} == {1}
    for (gpu_mib, ranks), (fraction,) in by_set_up.items():
        assert round(1 - left_free(ranks) / MIB / gpu_mib, 3) == fraction


def test_sizes_of_the_default_model_are_those_of_its_configuration() -> None:
    model = MODELS[SEVEN]
    assert model.kv_per_token(1) == 57_344
    assert model.kv_per_token(8) == model.kv_per_token(4) == 14_336
    assert round(model.weights(1) / 1e9, 2) == 15.23
    assert model.weights(2) == model.weights(1) // 2


@pytest.mark.parametrize("gpu_bytes", [A100_80GB, A100_40GB])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_target_draft_and_reserve_fit_beside_each_other(gpu_bytes: int, tensor_parallel: int) -> None:
    for target, draft in product(MODELS.values(), repeat=2):
        fraction = fraction_beside_draft(target, draft, gpu_bytes, tensor_parallel)
        pool = fraction * gpu_bytes - target.weights(tensor_parallel)
        tokens = pool / target.kv_per_token(tensor_parallel)
        if tokens <= 0:
            continue
        rest = draft.weights(tensor_parallel) + tokens * draft.kv_per_token(tensor_parallel)
        assert fraction * gpu_bytes + rest + reserve(gpu_bytes, tensor_parallel) <= gpu_bytes


FRACTIONS: dict[str, tuple[Launch, str, list[str], list[str]]] = {
    "default pair": (launch(), "0.5.8.post1", [], ["--mem-fraction-static", "0.59"]),
    "40 GB": (launch(gpu_bytes=A100_40GB), "0.5.8.post1", [], ["--mem-fraction-static", "0.62"]),
    "large target on eight GPUs": (
        launch("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", tensor_parallel=8),
        "0.5.8.post1",
        [],
        ["--mem-fraction-static", "0.62"],
    ),
    "version that counts the draft": (launch(), "0.5.23", [], []),
    "fraction of the user": (launch(), "0.5.8.post1", ["--mem-fraction-static=0.5"], []),
    "abbreviated fraction of the user": (launch(), "0.5.8.post1", ["--mem-frac", "0.5"], []),
    "quantized weights": (launch(), "0.5.8.post1", ["--quantization", "fp8"], []),
    "draft head": (launch(algorithm="Eagle"), "0.5.8.post1", [], []),
    "unknown draft": (launch(draft="org/draft"), "0.5.8.post1", [], []),
    "unknown target": (launch("/opt/model"), "0.5.8.post1", [], []),
    "unknown GPU": (launch(gpu_bytes=None), "0.5.8.post1", [], []),
    "greedy": (launch(draft=None), "0.5.8.post1", [], []),
}


@pytest.mark.parametrize(
    ("described", "version", "arguments", "wanted"), FRACTIONS.values(), ids=FRACTIONS.keys()
)
def test_fraction_is_set_only_where_the_default_of_sglang_is_wrong(
    described: Launch, version: str, arguments: list[str], wanted: list[str]
) -> None:
    assert SGLANG.memory_arguments(described, version, arguments) == wanted


def test_models_that_cannot_fit_are_refused_with_the_sum() -> None:
    with pytest.raises(EngineError) as refused:
        SGLANG.memory_arguments(launch("meta-llama/Llama-3.1-70B-Instruct", None), "0.5.23", [])
    assert str(refused.value) == (
        "spec.engine.tensorParallel: 131.4 GiB (meta-llama/Llama-3.1-70B-Instruct) = 131.4 GiB per GPU do "
        "not fit into 80.0 GiB, with 16-bit weights and tensorParallel 1; increase tensorParallel, use a smaller "
        "model, or set --quantization or --mem-fraction-static in args"
    )


def test_pair_without_room_for_a_kv_cache_is_refused() -> None:
    with pytest.raises(
        EngineError, match=r"\(activations and CUDA graphs\) = .* per GPU do not fit into 80\.0 GiB"
    ):
        SGLANG.memory_arguments(launch("Qwen/Qwen2.5-32B-Instruct", SEVEN), "0.5.8.post1", [])
    with pytest.raises(EngineError) as refused:
        SGLANG.memory_arguments(launch("Qwen/Qwen2.5-32B-Instruct", SEVEN), "0.5.23", [])
    assert str(refused.value).startswith(
        "spec.engine.tensorParallel: 61.0 GiB (Qwen/Qwen2.5-32B-Instruct) + 14.2 GiB (draft "
        "Qwen/Qwen2.5-7B-Instruct) + 5.8 GiB (KV caches of 16384 tokens) + 1.6 GiB (left free by SGLang) = 82.6 GiB "
        "per GPU do not fit into 80.0 GiB"
    )


def test_smallest_kv_caches_hold_the_same_tokens_of_the_target_and_of_the_draft() -> None:
    """The sum is that of SGLang 0.5.23, which counts each layer of the draft like one of the target."""
    target, draft = MODELS["Qwen/Qwen2.5-32B-Instruct"], MODELS[SEVEN]
    weights = target.weights(1) + draft.weights(1)
    cell = target.kv_per_token(1) * (target.layers + draft.layers) // target.layers
    smallest = weights + MIN_TOKENS * cell + left_free(1)
    described = launch("Qwen/Qwen2.5-32B-Instruct", SEVEN)
    assert SGLANG.memory_arguments(replace(described, gpu_bytes=smallest), "0.5.23", []) == []
    with pytest.raises(EngineError):
        SGLANG.memory_arguments(replace(described, gpu_bytes=smallest - 1), "0.5.23", [])
    assert SGLANG.memory_arguments(described, "0.5.23", ["--max-total-tokens", "4096"]) == []


def test_models_that_fit_on_more_gpus_are_accepted() -> None:
    described = launch("meta-llama/Llama-3.1-70B-Instruct", None, tensor_parallel=2)
    assert SGLANG.memory_arguments(described, "0.5.23", []) == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--max-total-tokens", "9"], True),
        (["--log-level", "info"], False),
        (["--", "0.5"], False),
        ([], False),
    ],
)
def test_flags_that_decide_about_memory_are_recognized(arguments: list[str], wanted: bool) -> None:
    assert limits_memory(arguments) is wanted
