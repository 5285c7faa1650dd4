"""Whether models can be split across GPUs."""

import pytest

from dps_engines.launch import EngineError, Launch, Speculation
from dps_engines.model_fit import check_heads
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
    ],
)
def test_heads_are_divided_equally_among_the_gpus(model: str, possible: list[int]) -> None:
    assert [gpus for gpus in range(1, 17) if MODELS[model].splits(gpus)] == possible


def test_tensor_parallelism_that_a_model_does_not_allow_is_refused() -> None:
    with pytest.raises(EngineError) as refused:
        check_heads(Launch(SEVEN, "m", 30000, tensor_parallel=8))
    assert str(refused.value) == (
        "spec.engine.tensorParallel: the 28 attention heads and 4 KV heads of Qwen/Qwen2.5-7B-Instruct cannot be "
        "divided among 8 GPUs; choose one of 1, 2, 4"
    )


def test_draft_model_is_split_across_the_same_gpus() -> None:
    speculation = Speculation("Standalone", HALF)
    check_heads(Launch(SEVEN, "m", 30000, tensor_parallel=2, speculation=speculation))
    with pytest.raises(
        EngineError, match=f"of draft {HALF} cannot be divided among 4 GPUs; choose one of 1, 2$"
    ):
        check_heads(Launch(SEVEN, "m", 30000, tensor_parallel=4, speculation=speculation))


def test_nothing_is_assumed_about_other_models() -> None:
    check_heads(Launch("org/model", "m", 30000, tensor_parallel=3))
