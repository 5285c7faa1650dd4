"""Host memory of an SGLang engine with the hierarchical cache (HiCache), which copies the KV caches of its GPUs.

Without --hicache-size and --hicache-ratio, SGLang copies them up to twice, but uses at most 80 % of the host memory
that is free, after a reserve of 10 GiB. It warns if there is less memory than for one copy, so that is counted.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from dps_engines.launch import EngineError, Launch
from dps_engines.model_fit import known_models, weights
from dps_engines.sglang.memory import left_free

ENABLE: Final = ("--enable-hierarchical-cache", "--enable-hicache")
GIGABYTE: Final = 10**9
COPIES: Final = 1.0


def host_cache_bytes(launch: Launch, line: Sequence[str]) -> int:
    """The host memory for copies of KV, in bytes; without HiCache's own if the sizes of model or GPU are not known.

    line: the whole command line. Raises EngineError if a size in it is not a number.
    """
    if not set(ENABLE) & set(line):
        return 0
    cache = launch.prefix_cache
    segment = 0 if cache is None else cache.segment_bytes
    return segment + launch.tensor_parallel * _copies(launch, line)


def _copies(launch: Launch, line: Sequence[str]) -> int:
    """The host memory per GPU. The KV cache of a draft model is copied for as many tokens as that of the target."""
    ranks, target = launch.tensor_parallel, launch.models.get(launch.model)
    per_token = sum(model.kv_per_token(ranks) for model in known_models(launch).values())
    if size := _value(line, "--hicache-size"):
        return int(size * GIGABYTE * (per_token / target.kv_per_token(ranks) if target else 1))
    copies = _value(line, "--hicache-ratio") or COPIES
    if target is None:
        return 0
    if tokens := _value(line, "--max-total-tokens"):
        return int(copies * tokens * per_token)
    if launch.gpu_bytes is None:
        return 0
    return int(copies * max(0, launch.gpu_bytes - sum(weights(launch).values()) - left_free(ranks)))


def _value(line: Sequence[str], flag: str) -> float:
    """The last value of a flag; 0 if it is not set."""
    found = "0"
    for argument, following in pairwise([*line, "0"]):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else following
    try:
        return float(found)
    except ValueError as error:
        raise EngineError(f"{flag}: {found} is not a number") from error
