"""Whether models fit into GPUs, and which arguments of SGLang change that."""

from dataclasses import replace

import pytest

from dps_engines.launch import Launch, Speculation
from dps_engines.model_fit import GIB, fit_warning

SEVEN, THIRTY_TWO = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-32B-Instruct"
PAIR = Launch(THIRTY_TWO, "m", 30000, speculation=Speculation("Standalone", SEVEN), gpu_bytes=80 * GIB)


def test_warning_states_the_sum_of_both_models_and_their_smallest_caches() -> None:
    assert fit_warning(PAIR) == (
        "61.0 GiB (Qwen/Qwen2.5-32B-Instruct) + 14.2 GiB (draft Qwen/Qwen2.5-7B-Instruct) + 4.9 GiB (KV caches of "
        "16384 tokens) = 80.1 GiB per GPU do not fit into 80.0 GiB, with 16-bit weights and tensorParallel 1; "
        "increase tensorParallel, use smaller models, or set --quantization in args"
    )


@pytest.mark.parametrize(
    "launch",
    [
        replace(PAIR, speculation=None),
        replace(PAIR, tensor_parallel=2),
        replace(PAIR, gpu_bytes=None),
        replace(PAIR, model="org/model", speculation=None),
    ],
    ids=["without the draft", "two GPUs", "unknown GPU", "unknown model"],
)
def test_models_that_fit_or_are_not_known_cause_no_warning(launch: Launch) -> None:
    assert fit_warning(launch) == ""
