"""The host memory of SGLang's hierarchical cache."""

from dataclasses import replace

import pytest

from dps_engines.launch import EngineError, Launch, MooncakeCache, Speculation
from dps_engines.model_fit import GIB
from dps_engines.models import MODELS
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.memory import left_free

SGLANG = RUNTIMES["SGLang"]
SEVEN, ONE_AND_A_HALF = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"
CACHE = MooncakeCache("m:1", 0, "o", "0.5.23")
GREEDY = Launch(SEVEN, "m", 30000, prefix_cache=CACHE, gpu_bytes=80 * GIB)
PAIR = replace(GREEDY, speculation=Speculation("Standalone", ONE_AND_A_HALF))
OTHER = replace(GREEDY, model="org/model")
KV_CACHE = 80 * GIB - MODELS[SEVEN].weights(1) - left_free(1)
PER_TOKEN = MODELS[SEVEN].kv_per_token(1)


def host_cache(launch: Launch, *arguments: str) -> int:
    return SGLANG.host_cache_bytes(launch, [*SGLANG.arguments(launch), *arguments])


SIZES: dict[str, tuple[Launch, list[str], int]] = {
    "the KV cache once": (GREEDY, [], KV_CACHE),
    "a size in gigabytes": (GREEDY, ["--hicache-size", "40"], 40 * 10**9),
    "the last of two sizes": (GREEDY, ["--hicache-size=10", "--hicache-size=20"], 20 * 10**9),
    "a size and a draft model": (PAIR, ["--hicache-size", "40"], 60 * 10**9),
    "a size of each GPU": (replace(GREEDY, tensor_parallel=2), ["--hicache-size", "40"], 80 * 10**9),
    "a known number of tokens": (GREEDY, ["--max-total-tokens", "1000"], 1000 * PER_TOKEN),
    "the weights of the draft model less": (PAIR, [], KV_CACHE - MODELS[ONE_AND_A_HALF].weights(1)),
    "a size for another model": (OTHER, ["--hicache-size", "40"], 40 * 10**9),
    "HiCache without a common prefix cache": (
        replace(GREEDY, prefix_cache=None),
        ["--enable-hierarchical-cache", "--hicache-size", "40"],
        40 * 10**9,
    ),
    "a segment of Mooncake as well": (
        replace(GREEDY, prefix_cache=replace(CACHE, segment_bytes=64 * GIB)),
        ["--hicache-size", "40"],
        64 * GIB + 40 * 10**9,
    ),
}


@pytest.mark.parametrize(("launch", "arguments", "expected"), SIZES.values(), ids=SIZES.keys())
def test_host_memory_is_that_of_the_copies(launch: Launch, arguments: list[str], expected: int) -> None:
    assert host_cache(launch, *arguments) == expected


def test_size_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(EngineError, match=r"^--hicache-size: large is not a number$"):
        host_cache(GREEDY, "--hicache-size", "large")


def test_vllm_copies_no_kv() -> None:
    assert RUNTIMES["VLLM"].host_cache_bytes(Launch(SEVEN, "m", 8000, gpu_bytes=80 * GIB), []) == 0
