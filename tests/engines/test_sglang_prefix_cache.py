"""SGLang engines with a shared prefix cache: their flags, and which engines can share."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dps_engines.launch import (
    EngineError,
    FileCache,
    Launch,
    MooncakeCache,
    PrefixCache,
    Speculation,
    Unshareable,
)
from dps_engines.pools import PoolName
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.prefix_cache import GEOMETRY, MANAGED, SHARED, page_tag
from dps_sglang.compatibility import VERSIONS
from dps_sglang.settings import GIBIBYTE, Settings
from dps_sglang.storage.store import Limits

ROOT = Path(__file__).parents[2]
SGLANG = RUNTIMES["SGLang"]
STANDALONE, NGRAM = Speculation("Standalone", "d"), Speculation("Ngram")
CACHE = FileCache("/kv", "/etc/secret", max_bytes=200 * GIBIBYTE, min_free_bytes=GIBIBYTE // 2)
MOONCAKE = MooncakeCache(
    "qwen-mooncake.serving.svc:50051",
    segment_bytes=64 * GIBIBYTE,
    owner="serving/qwen",
    version="0.5.23",
    protocol="rdma",
    devices=("mlx5_0", "mlx5_1"),
)
CACHES: dict[str, PrefixCache] = {"file": CACHE, "mooncake": MOONCAKE}
NO_ARGUMENTS: list[str] = []


def options(version: str) -> dict[str, Any]:
    """The options recorded from SGLang's parser."""
    recorded: dict[str, Any] = json.loads(
        (Path(__file__).parent / "fixtures" / f"sglang-{version}-flags.json").read_text()
    )
    return recorded


def added_flags(cache: PrefixCache = CACHE) -> list[str]:
    """The part of the command line that the prefix cache adds."""
    without = SGLANG.arguments(Launch("m", "m", 30000))
    line = SGLANG.arguments(Launch("m", "m", 30000, prefix_cache=cache))
    assert line[: len(without)] == without
    return line[len(without) :]


def test_prefix_cache_adds_the_flags_of_hicache_and_the_plugins_settings() -> None:
    *flags, settings = added_flags()
    assert flags == [
        *("--page-size", "64"),
        *("--tokenizer-worker-num", "1"),
        "--enable-hierarchical-cache",
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-prefetch-policy", "timeout"),
        *("--hicache-storage-backend", "dynamic"),
        "--hicache-storage-backend-extra-config",
    ]
    assert json.loads(settings) == {
        "backend_name": "dps",
        "module_path": "dps_sglang.adapter",
        "class_name": "SharedPrefixCache",
        "interface_v1": 1,
        "directory": "/kv",
        "secret_file": "/etc/secret",
        "max_gib": 200,
        "min_free_gib": 0.5,
    }


def test_drafts_of_ngram_are_a_chain_if_there_is_a_prefix_cache() -> None:
    """SGLang 0.5.23 refuses to start with NGRAM, trees and pages of several tokens unless it uses flashinfer."""

    def line(speculation: Speculation, cache: PrefixCache | None) -> list[str]:
        return SGLANG.arguments(Launch("m", "m", 30000, speculation=speculation, prefix_cache=cache))

    flag = "--speculative-ngram-max-bfs-breadth"
    assert (flag, "1") in pairwise(line(NGRAM, CACHE))
    assert flag not in {*line(STANDALONE, CACHE), *line(NGRAM, None)}


def test_mooncake_adds_the_flags_of_hicache_and_sglangs_settings() -> None:
    *flags, settings = added_flags(MOONCAKE)
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
        "global_segment_size": 64 * GIBIBYTE,
        "extra_backend_tag": page_tag(Launch("m", "m", 30000), MOONCAKE),
    }


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


def test_plugin_accepts_the_settings() -> None:
    assert Settings.parse(json.loads(added_flags()[-1])) == Settings(
        Path("/kv"), Path("/etc/secret"), Limits(200 * GIBIBYTE, GIBIBYTE // 2), None
    )


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_flags_and_their_values_are_accepted_by_the_supported_version(
    version: str, cache: PrefixCache
) -> None:
    recorded = options(version)
    line = added_flags(cache)
    for flag, value in pairwise([*line, ""]):
        if flag.startswith("--"):
            choices = recorded[flag]["choices"]
            assert choices is None or value in choices
    assert set(MANAGED) <= set(recorded)


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_every_name_of_a_flag_is_listed(version: str) -> None:
    recorded = options(version)
    listed = {*MANAGED, *GEOMETRY, *(alias for aliases in GEOMETRY.values() for alias in aliases)}
    destinations = {recorded[name]["dest"] for name in listed}
    assert {name for name, option in recorded.items() if option["dest"] in destinations} == listed


@pytest.mark.parametrize("argument", ["--page-size=1", "--enable-hicache", "--hicache-write-policy"])
def test_flag_of_the_prefix_cache_is_refused_only_with_a_prefix_cache(argument: str) -> None:
    SGLANG.check_arguments([argument], None)
    name = argument.split("=", 1)[0]
    with pytest.raises(EngineError, match=rf"^{name} is set by spec\.prefixCache; remove it$"):
        SGLANG.check_arguments([argument], None, prefix_cache=True)


SHAREABLE: dict[str, tuple[Speculation, list[str], list[str]]] = {
    "Standalone": (STANDALONE, NO_ARGUMENTS, NO_ARGUMENTS),
    "Ngram": (NGRAM, NO_ARGUMENTS, NO_ARGUMENTS),
    "equal data types": (NGRAM, ["--kv-cache-dtype", "fp8_e5m2"], ["--kv-cache-dtype=fp8_e5m2"]),
    "equal parallelism by another name": (NGRAM, ["--pp-size", "2"], ["--pipeline-parallel-size", "2"]),
    "arguments that do not affect a page": (
        NGRAM,
        ["--mem-fraction-static", "0.7"],
        ["--log-level", "debug"],
    ),
}


@pytest.mark.parametrize(("speculation", "speculative", "greedy"), SHAREABLE.values(), ids=SHAREABLE.keys())
def test_pools_can_share(speculation: Speculation, speculative: list[str], greedy: list[str]) -> None:
    arguments: Mapping[PoolName, list[str]] = {"speculative": speculative, "greedy": greedy}
    assert SGLANG.unshareable("0.5.23", speculation, arguments) is None


UNSHAREABLE: dict[str, tuple[str, Speculation, list[str], list[str], Unshareable]] = {
    "Eagle3": (
        "0.5.23",
        Speculation("Eagle3", "d"),
        NO_ARGUMENTS,
        NO_ARGUMENTS,
        Unshareable(
            "AlgorithmNotSupported",
            "Eagle3 engines share KV with no other engine; set spec.pools.speculative.speculation.algorithm to "
            "Standalone or Ngram, or spec.prefixCache.mode to Separate",
        ),
    ),
    "another version": (
        "0.5.8.post1",
        NGRAM,
        NO_ARGUMENTS,
        NO_ARGUMENTS,
        Unshareable(
            "VersionNotSupported",
            "the plugin does not support SGLang 0.5.8.post1; set spec.engine.version or the tag of "
            "spec.engine.image to 0.5.23",
        ),
    ),
    "LoRA": (
        "0.5.23",
        NGRAM,
        NO_ARGUMENTS,
        ["--enable-lora"],
        Unshareable(
            "LoRAEnabled",
            "engines with LoRA adapters share no KV; remove --enable-lora from the arguments of the greedy pool",
        ),
    ),
    "another data type": (
        "0.5.23",
        STANDALONE,
        ["--kv-cache-dtype", "auto", "--kv-cache-dtype", "fp8_e5m2"],
        ["--kv-cache-dtype", "bf16"],
        Unshareable(
            "ArgumentsDiffer",
            "--kv-cache-dtype is fp8_e5m2 in the speculative pool and bf16 in the greedy pool; set it in "
            "spec.engine.args, for both pools",
        ),
    ),
    "a revision of one pool": (
        "0.5.23",
        STANDALONE,
        NO_ARGUMENTS,
        ["--revision=main"],
        Unshareable(
            "ArgumentsDiffer",
            "--revision is unset in the speculative pool and main in the greedy pool; set it in "
            "spec.engine.args, for both pools",
        ),
    ),
    "a flag without a value": (
        "0.5.23",
        NGRAM,
        ["--enable-dp-attention"],
        NO_ARGUMENTS,
        Unshareable(
            "ArgumentsDiffer",
            "--enable-dp-attention is set in the speculative pool and unset in the greedy pool; set it in "
            "spec.engine.args, for both pools",
        ),
    ),
}


@pytest.mark.parametrize(
    ("version", "speculation", "speculative", "greedy", "expected"),
    UNSHAREABLE.values(),
    ids=UNSHAREABLE.keys(),
)
def test_pools_that_cannot_share_are_reported_with_what_to_change(
    version: str, speculation: Speculation, speculative: list[str], greedy: list[str], expected: Unshareable
) -> None:
    arguments: Mapping[PoolName, list[str]] = {"speculative": speculative, "greedy": greedy}
    assert SGLANG.unshareable(version, speculation, arguments) == expected


@pytest.mark.parametrize("reason", sorted({case[-1].reason for case in UNSHAREABLE.values()}))
def test_every_reason_is_in_the_troubleshooting_page(reason: str) -> None:
    assert f"\n| `{reason}` | " in (ROOT / "docs/troubleshooting.md").read_text()


def test_documented_table_of_pairs_is_the_one_of_the_code() -> None:
    text = (ROOT / "docs/prefix-cache.md").read_text()
    table = re.search(r"\| written by .*?\n\n", text, re.DOTALL)
    assert table is not None
    header, _, *rows = [
        [cell.strip().replace("`", "").removeprefix("read by ") for cell in line.strip("|").split("|")]
        for line in table[0].strip().splitlines()
    ]
    documented = {
        (writer.strip().upper(), reader.strip().upper())
        for row in rows
        for readers, cell in zip(header[1:], row[1:], strict=True)
        for writer in row[0].split(",")
        for reader in readers.split(",")
        if cell.startswith("yes")
    }
    assert documented == SHARED
