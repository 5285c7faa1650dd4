"""Whether models can be split across GPUs."""

from dataclasses import replace

import pytest

from dps_engines.launch import EngineError, Launch, Speculation
from dps_engines.model_fit import check_split
from dps_engines.models import MODELS

SEVEN, HALF = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize(
    ("model", "possible"),
    [
        (SEVEN, [1, 2, 4]),
        # KV heads are replicated if there are fewer than GPUs.
        ("Qwen/Qwen2.5-3B-Instruct", [1, 2, 4, 8, 16]),
        ("meta-llama/Llama-3.1-70B-Instruct", [1, 2, 4, 8, 16]),
        ("meta-llama/Llama-3.2-3B-Instruct", [1, 2, 4, 8]),
        # 14 GPUs could have equal numbers of heads.
        (HALF, [1, 2]),
    ],
)
def test_heads_and_mlps_are_divided_equally_among_the_gpus(model: str, possible: list[int]) -> None:
    assert [gpus for gpus in range(1, 17) if MODELS[model].splits(gpus)] == possible


def test_tensor_parallelism_that_a_model_does_not_allow_is_refused() -> None:
    with pytest.raises(EngineError) as refused:
        check_split(Launch(SEVEN, "m", 30000, tensor_parallel=8))
    assert str(refused.value) == (
        "spec.engine.tensorParallel: the 28 attention heads and 4 KV heads of Qwen/Qwen2.5-7B-Instruct cannot be "
        "divided among 8 GPUs; choose one of 1, 2, 4"
    )


def test_mlp_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(EngineError) as refused:
        check_split(Launch("Qwen/Qwen2.5-1.5B-Instruct", "m", 30000, tensor_parallel=6))
    assert str(refused.value) == (
        "spec.engine.tensorParallel: the MLP of Qwen/Qwen2.5-1.5B-Instruct, whose size is 8960, cannot be divided "
        "among 6 GPUs; choose one of 1, 2, 4"
    )


def test_mlp_of_unknown_size_is_assumed_to_be_divisible() -> None:
    unknown = {"org/model": replace(MODELS[HALF], intermediate_size=None)}
    check_split(Launch("org/model", "m", 30000, tensor_parallel=14, models=unknown))


def test_draft_model_is_split_across_the_same_gpus() -> None:
    speculation = Speculation("Standalone", HALF)
    check_split(Launch(SEVEN, "m", 30000, tensor_parallel=2, speculation=speculation))
    with pytest.raises(
        EngineError, match=f"of draft {HALF} cannot be divided among 4 GPUs; choose one of 1, 2$"
    ):
        check_split(Launch(SEVEN, "m", 30000, tensor_parallel=4, speculation=speculation))


def test_nothing_is_assumed_about_other_models() -> None:
    check_split(Launch("org/model", "m", 30000, tensor_parallel=3))
