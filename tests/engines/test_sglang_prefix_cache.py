"""SGLang engines with a shared prefix cache: their flags, and which engines can share."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from dps_engines.launch import EngineError, Launch, MooncakeCache, Speculation, Unshareable
from dps_engines.pools import PoolName
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.prefix_cache import MANAGED, page_tag
from dps_sglang.compatibility import VERSIONS
from dps_testkit.engine_options import check_accepted, recorded_options

SGLANG = RUNTIMES["SGLang"]
STANDALONE, NGRAM = Speculation("Standalone", "d"), Speculation("Ngram")
MOONCAKE = MooncakeCache(
    "qwen-mooncake.serving.svc:50051",
    segment_bytes=2**36,
    owner="serving/qwen",
    version="0.5.23",
    protocol="rdma",
    devices=("mlx5_0", "mlx5_1"),
)


def added_flags() -> list[str]:
    """The part of the command line that the prefix cache adds."""
    without = SGLANG.arguments(Launch("m", "m", 30000))
    line = SGLANG.arguments(Launch("m", "m", 30000, prefix_cache=MOONCAKE))
    assert line[: len(without)] == without
    return line[len(without) :]


def test_prefix_cache_adds_the_flags_of_hicache_and_the_settings_of_mooncake() -> None:
    *flags, settings = added_flags()
    assert flags == [
        *("--page-size", "64"),
        *("--tokenizer-worker-num", "1"),
        "--enable-hierarchical-cache",
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-prefetch-policy", "timeout"),
        *("--hicache-storage-backend", "mooncake"),
        "--hicache-storage-backend-extra-config",
    ]
    assert json.loads(settings) == {
        "master_server_address": "qwen-mooncake.serving.svc:50051",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "rdma",
        "device_name": "mlx5_0,mlx5_1",
        "global_segment_size": 2**36,
        "extra_backend_tag": page_tag(Launch("m", "m", 30000), MOONCAKE),
    }


def test_drafts_of_ngram_are_a_chain_if_there_is_a_prefix_cache() -> None:
    """SGLang 0.5.23 refuses to start with NGRAM, trees and pages of several tokens unless it uses flashinfer."""

    def line(speculation: Speculation, cache: MooncakeCache | None) -> list[str]:
        return SGLANG.arguments(Launch("m", "m", 30000, speculation=speculation, prefix_cache=cache))

    flag = "--speculative-ngram-max-bfs-breadth"
    assert (flag, "1") in pairwise(line(NGRAM, MOONCAKE))
    assert flag not in {*line(STANDALONE, MOONCAKE), *line(NGRAM, None)}


LAUNCH = Launch("m", "m", 30000)
OTHER_TAGS: dict[str, tuple[Launch, MooncakeCache]] = {
    "deployment": (LAUNCH, replace(MOONCAKE, owner="serving/other")),
    "version": (LAUNCH, replace(MOONCAKE, version="0.5.24")),
    "model": (replace(LAUNCH, model="other"), MOONCAKE),
    "revision": (replace(LAUNCH, revision="v2"), MOONCAKE),
    "source of the weights": (LAUNCH, replace(MOONCAKE, weights="s3://models/v2")),
    "tensor parallelism": (replace(LAUNCH, tensor_parallel=2), MOONCAKE),
    "data type": (LAUNCH, replace(MOONCAKE, arguments=("--dtype", "half"))),
    "memory layout": (LAUNCH, replace(MOONCAKE, arguments=("--hicache-mem-layout=page_first_direct",))),
}


@pytest.mark.parametrize(("launch", "cache"), OTHER_TAGS.values(), ids=OTHER_TAGS.keys())
def test_pages_of_other_geometries_have_another_tag(launch: Launch, cache: MooncakeCache) -> None:
    assert page_tag(launch, cache) != page_tag(LAUNCH, MOONCAKE)


SAME_TAG: dict[str, tuple[Launch, MooncakeCache]] = {
    "other pool": (replace(LAUNCH, speculation=STANDALONE), MOONCAKE),
    "other address": (LAUNCH, replace(MOONCAKE, master="other:50051", protocol="tcp", devices=())),
    "other size": (LAUNCH, replace(MOONCAKE, segment_bytes=1)),
    "argument that does not affect a page": (LAUNCH, replace(MOONCAKE, arguments=("--log-level", "debug"))),
}


@pytest.mark.parametrize(("launch", "cache"), SAME_TAG.values(), ids=SAME_TAG.keys())
def test_engines_that_can_share_pages_have_the_same_tag(launch: Launch, cache: MooncakeCache) -> None:
    assert page_tag(launch, cache) == page_tag(LAUNCH, MOONCAKE)


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_flags_and_their_values_are_accepted_by_the_supported_version(version: str) -> None:
    recorded = recorded_options("sglang", version)
    check_accepted(recorded, added_flags())
    assert set(MANAGED) <= set(recorded)


@pytest.mark.parametrize("argument", ["--page-size=1", "--enable-hicache", "--hicache-write-policy"])
def test_flag_of_the_prefix_cache_is_refused_only_with_a_prefix_cache(argument: str) -> None:
    SGLANG.check_arguments([argument], None)
    name = argument.split("=", 1)[0]
    with pytest.raises(EngineError, match=rf"^{name} is set by spec\.prefixCache; remove it$"):
        SGLANG.check_arguments([argument], None, prefix_cache=True)


def differ(values: str) -> Unshareable:
    return Unshareable("ArgumentsDiffer", f"{values}; set it in spec.engine.args, for both pools")


PAIRS: dict[str, tuple[Speculation, list[str], list[str], Unshareable | None]] = {
    "Standalone": (STANDALONE, [], [], None),
    "Ngram": (NGRAM, [], [], None),
    "equal parallelism by another name": (NGRAM, ["--pp-size", "2"], ["--pipeline-parallel-size", "2"], None),
    "no effect on a page": (NGRAM, ["--mem-fraction-static", "0.7"], ["--log-level", "debug"], None),
    "Eagle3": (
        Speculation("Eagle3", "d"),
        [],
        [],
        Unshareable(
            "AlgorithmNotSupported",
            "Eagle3 engines share KV with no other engine; set spec.pools.speculative.speculation.algorithm to "
            "Standalone or Ngram, or spec.prefixCache.mode to Separate",
        ),
    ),
    "LoRA": (
        NGRAM,
        [],
        ["--enable-lora"],
        Unshareable(
            "LoRAEnabled",
            "engines with LoRA adapters share no KV; remove --enable-lora from the arguments of the greedy pool",
        ),
    ),
    "another data type": (
        STANDALONE,
        ["--kv-cache-dtype", "auto", "--kv-cache-dtype", "fp8_e5m2"],
        ["--kv-cache-dtype", "bf16"],
        differ("--kv-cache-dtype is fp8_e5m2 in the speculative pool and bf16 in the greedy pool"),
    ),
    "a flag without a value": (
        NGRAM,
        ["--enable-dp-attention"],
        [],
        differ("--enable-dp-attention is set in the speculative pool and unset in the greedy pool"),
    ),
}
OTHER_VERSION = Unshareable(
    "VersionNotSupported",
    "the plugin does not support SGLang 0.5.24; set spec.engine.version or the tag of spec.engine.image to 0.5.23",
)


@pytest.mark.parametrize(
    ("speculation", "speculative", "greedy", "expected"), PAIRS.values(), ids=PAIRS.keys()
)
def test_pools_that_cannot_share_are_reported_with_what_to_change(
    speculation: Speculation, speculative: list[str], greedy: list[str], expected: Unshareable | None
) -> None:
    arguments: Mapping[PoolName, list[str]] = {"speculative": speculative, "greedy": greedy}
    assert SGLANG.unshareable("0.5.23", speculation, arguments) == expected
    if expected is None:
        assert SGLANG.unshareable("0.5.24", speculation, arguments) == OTHER_VERSION
