"""How two engines divide the memory of one GPU."""

from dataclasses import replace
from itertools import product

import pytest

from dps_engines.launch import EngineError, Launch, Speculation
from dps_engines.model_fit import GIB, MIN_TOKENS
from dps_engines.models import MODELS
from dps_engines.sglang.shared_gpu import reserve, shared_arguments

A100_80GB, A100_40GB = 80 * GIB, 40 * GIB
SEVEN, ONE_AND_A_HALF = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"


def pair(
    model: str = SEVEN, draft: str | None = ONE_AND_A_HALF, gpu: int = A100_80GB
) -> tuple[Launch, Launch]:
    """A speculative and a greedy engine."""
    greedy = Launch(model, "m", 30000, gpu_bytes=gpu)
    speculation = Speculation("Standalone", draft) if draft else Speculation("Ngram")
    return replace(greedy, speculation=speculation), greedy


def values(arguments: list[str]) -> tuple[float, int]:
    assert arguments[::2] == ["--mem-fraction-static", "--max-total-tokens"]
    return float(arguments[1]), int(arguments[3])


@pytest.mark.parametrize("gpu", [A100_80GB, A100_40GB])
def test_both_engines_fit_whichever_starts_first(gpu: int) -> None:
    fitting = 0
    for model, draft in product(MODELS, [None, *MODELS]):
        first, second = pair(model, draft, gpu)
        try:
            (fraction, tokens), again = (
                values(shared_arguments(first, second, [])),
                values(shared_arguments(second, first, [])),
            )
        except EngineError:
            continue
        fitting += 1
        assert tokens == again[1] >= MIN_TOKENS
        names = [model, *([draft] if draft else [])]
        first_static = sum(MODELS[one].weights(1) + tokens * MODELS[one].kv_per_token(1) for one in names)
        second_static = MODELS[model].weights(1) + tokens * MODELS[model].kv_per_token(1)
        assert first_static + second_static + 2 * reserve(gpu, 1) <= gpu
        for static, other, share in (
            (first_static, second_static, fraction),
            (second_static, first_static, again[0]),
        ):
            free = gpu - other - reserve(gpu, 1)
            assert static <= share * free, "the KV cache has its size although the other engine runs"
            assert share < 1
    assert fitting > 3


def test_models_that_do_not_fit_on_one_gpu_are_refused_with_the_sum() -> None:
    with pytest.raises(EngineError) as refused:
        shared_arguments(*pair(gpu=A100_40GB), [])
    assert str(refused.value) == (
        "spec.placement: both engines need 31.2 GiB (weights) + 13.4 GiB (activations and CUDA graphs) + 2.2 GiB "
        "(KV caches of 16384 tokens) = 46.8 GiB, but the GPU has 40.0 GiB; use smaller models, or placement "
        "SeparateGPUs"
    )


@pytest.mark.parametrize(
    "engines",
    [pair(model="/models/own"), pair(draft="org/draft"), pair(gpu=0)],
    ids=["model", "draft", "gpu"],
)
def test_unknown_sizes_are_refused_unless_the_user_decides(engines: tuple[Launch, Launch]) -> None:
    if engines[0].gpu_bytes == 0:
        engines = (replace(engines[0], gpu_bytes=None), replace(engines[1], gpu_bytes=None))
    with pytest.raises(
        EngineError, match="set --mem-fraction-static and --max-total-tokens in the args of both"
    ):
        shared_arguments(*engines, [])
    assert shared_arguments(*engines, ["--mem-fraction-static=0.4"]) == []
