"""The GPU memory of SGLang engines, compared with SGLang's own arithmetic."""

from itertools import product
from typing import Any

import pytest

from dps_engines.launch import Algorithm, EngineError, Launch, Speculation
from dps_engines.models import GIB, MODELS
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.memory import fraction_beside_draft, limits_memory, reserve

SGLANG = RUNTIMES["SGLang"]
A100_80GB, A100_40GB = 80 * GIB, 40 * GIB
SEVEN, ONE_AND_A_HALF = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"


def launch(model: str = SEVEN, draft: str | None = ONE_AND_A_HALF, **fields: Any) -> Launch:
    algorithm: Algorithm = fields.pop("algorithm", "Standalone")
    speculation = Speculation(algorithm, draft) if draft else None
    return Launch(model, "m", 30000, speculation=speculation, **({"gpu_bytes": A100_80GB} | fields))


@pytest.mark.parametrize(
    ("gpu_bytes", "tensor_parallel", "fraction"),
    [(A100_80GB, 1, 0.761), (A100_80GB, 8, 0.744), (A100_40GB, 1, 0.683)],
)
def test_reserve_is_that_of_sglang(gpu_bytes: int, tensor_parallel: int, fraction: float) -> None:
    """SGLang 0.5.8.post1 adds 6 GiB for a STANDALONE draft and rounds the fraction to three digits."""
    reserved = reserve(gpu_bytes, tensor_parallel) + 6 * GIB
    assert round((gpu_bytes - reserved) / gpu_bytes, 3) == fraction


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
    assert SGLANG.memory_arguments(launch("Qwen/Qwen2.5-32B-Instruct", SEVEN), "0.5.23", []) == []


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
