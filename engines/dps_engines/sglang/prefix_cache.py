"""SGLang engines with a prefix cache that both pools share: which engines can share, and their flags.

The engines share KV pages through HiCache, SGLang's hierarchical cache, and the plugin dps_sglang.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from dps_engines import flags
from dps_engines.flags import Flag
from dps_engines.launch import Launch, MooncakeCache, Speculation, Unshareable
from dps_engines.pools import PoolName
from dps_engines.sglang.flags import ENABLE_LORA
from dps_sglang.compatibility import VERSIONS

GREEDY: Final = "GREEDY"

SHARED: Final = frozenset(
    {
        (GREEDY, GREEDY),
        (GREEDY, "NGRAM"),
        ("NGRAM", GREEDY),
        ("NGRAM", "NGRAM"),
        ("STANDALONE", GREEDY),
        ("STANDALONE", "NGRAM"),
        ("STANDALONE", "STANDALONE"),
        (GREEDY, "STANDALONE"),
        ("NGRAM", "STANDALONE"),
    }
)
"""(writer, reader) pairs that can share KV through SGLang's HiCache storage.

For the last two pairs, the draft model has to prefill what was fetched. This requires the plugin dps_sglang; SGLang
0.5.23 alone shares no KV between them. EAGLE and EAGLE3 key their pages by bigrams and share with no engine.
"""

GEOMETRY: Final[Mapping[str, tuple[str, ...]]] = {
    "--revision": (),
    "--dtype": (),
    "--kv-cache-dtype": (),
    "--quantization": (),
    "--quantization-param-path": (),
    "--json-model-override-args": (),
    "--model-impl": (),
    "--load-format": (),
    "--model-loader-extra-config": (),
    "--custom-weight-loader": (),
    "--modelopt-quant": (),
    "--quantize-and-serve": (),
    "--rl-quant-profile": (),
    "--prefill-kv-cache-dequant-dtype": (),
    "--kt-weight-path": (),
    "--kt-method": (),
    "--hicache-mem-layout": (),
    "--hicache-io-backend": (),
    "--pp-size": ("--pipeline-parallel-size",),
    "--attn-cp-size": ("--attention-context-parallel-size",),
    "--attn-dp-size": ("--attention-data-parallel-size",),
    "--dcp-size": ("--decode-context-parallel-size",),
    "--enable-dp-attention": (),
}
"""Flags that determine the bytes of a page, and their aliases.

Two engines whose values differ do not read each other's pages. The tensor-parallel size and the page size are the same
in both pools.
"""

PAGE_TOKENS: Final = 64
"""Tokens per page. Each page is a pair of objects, so small pages are slow."""

_SOURCE = "spec.prefixCache"


def page_tag(launch: Launch, cache: MooncakeCache) -> str:
    """The prefix of the names of an engine's pages: a digest of the owner and of all settings that determine a page.

    Engines with different tags do not read each other's pages.
    """
    geometry = {
        "owner": cache.owner,
        "version": cache.version,
        "model": launch.model,
        "revision": launch.revision,
        "weights": cache.weights,
        "tensor_parallel": launch.tensor_parallel,
        "page_tokens": PAGE_TOKENS,
        "arguments": _geometry(cache.arguments),
    }
    return "dps-" + hashlib.sha256(json.dumps(geometry, sort_keys=True).encode()).hexdigest()[:16]


def _mooncake_settings(launch: Launch) -> str | None:
    """Settings of SGLang's Mooncake backend.

    Each engine exchanges addresses with the others directly (P2PHANDSHAKE), because those in a metadata server would
    be lost when that restarts.
    """
    cache = launch.prefix_cache
    if cache is None:
        return None
    return json.dumps(
        {
            "master_server_address": cache.master,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": cache.protocol,
            "device_name": ",".join(cache.devices),
            "global_segment_size": cache.segment_bytes,
            "extra_backend_tag": page_tag(launch, cache),
        }
    )


def _ngram_breadth(launch: Launch) -> int | None:
    """With pages of several tokens, SGLang supports draft trees only with the attention backend flashinfer."""
    return 1 if launch.speculation is not None and launch.speculation.algorithm == "Ngram" else None


FLAGS: Final[tuple[Flag, ...]] = (
    Flag("--page-size", _SOURCE, lambda _: PAGE_TOKENS),
    # SGLang loads no plugins in additional workers, so they would not separate the tenants of /v1/messages.
    Flag("--tokenizer-worker-num", _SOURCE, lambda _: 1),
    Flag("--speculative-ngram-max-bfs-breadth", _SOURCE, _ngram_breadth),
    Flag("--enable-hierarchical-cache", _SOURCE, lambda _: True, ("--enable-hicache",)),
    Flag("--hicache-write-policy", _SOURCE, lambda _: "write_through"),
    Flag("--hicache-storage-prefetch-policy", _SOURCE, lambda _: "timeout"),
    Flag("--hicache-storage-backend", _SOURCE, lambda _: "mooncake"),
    Flag("--hicache-storage-backend-extra-config", _SOURCE, _mooncake_settings),
)
"""The flags of an engine with a shared prefix cache, in addition to those of `sglang.flags.FLAGS`."""

MANAGED: Final = flags.sources(FLAGS)
"""Flags that a user may not pass to an engine with a shared prefix cache, and the field that sets each."""


def arguments(cache: MooncakeCache) -> list[str]:
    """The part of an engine's command line that makes it share the cache."""
    return flags.arguments(Launch("", "", 0, prefix_cache=cache), FLAGS)


def unshareable(
    version: str, speculation: Speculation, arguments: Mapping[PoolName, Sequence[str]]
) -> Unshareable | None:
    """Why the two pools cannot read each other's pages; None if they can.

    speculation: of the speculative pool. arguments: the user's arguments of each pool.
    """
    algorithm = speculation.algorithm.upper()
    if not {(algorithm, GREEDY), (GREEDY, algorithm)} <= SHARED:
        return Unshareable(
            "AlgorithmNotSupported",
            f"{speculation.algorithm} engines share KV with no other engine; set "
            "spec.pools.speculative.speculation.algorithm to Standalone or Ngram, or spec.prefixCache.mode to Separate",
        )
    if version not in VERSIONS:
        supported = " or ".join(sorted(VERSIONS))
        return Unshareable(
            "VersionNotSupported",
            f"the plugin does not support SGLang {version}; set spec.engine.version or the tag of "
            f"spec.engine.image to {supported}",
        )
    for pool, given in arguments.items():
        if ENABLE_LORA in given:
            return Unshareable(
                "LoRAEnabled",
                f"engines with LoRA adapters share no KV; remove {ENABLE_LORA} from the arguments of the {pool} pool",
            )
    return _different_geometry(arguments)


def _different_geometry(arguments: Mapping[PoolName, Sequence[str]]) -> Unshareable | None:
    speculative, greedy = _geometry(arguments["speculative"]), _geometry(arguments["greedy"])
    for flag in GEOMETRY:
        if speculative.get(flag) != greedy.get(flag):
            values = f"{_shown(speculative.get(flag))} in the speculative pool and {_shown(greedy.get(flag))}"
            return Unshareable(
                "ArgumentsDiffer",
                f"{flag} is {values} in the greedy pool; set it in spec.engine.args, for both pools",
            )
    return None


def _shown(value: str | None) -> str:
    return "unset" if value is None else value or "set"


def _geometry(arguments: Sequence[str]) -> dict[str, str]:
    """The last value of each flag of GEOMETRY that is set; empty for a flag without a value."""
    names = {name: flag for flag, aliases in GEOMETRY.items() for name in (flag, *aliases)}
    found: dict[str, str] = {}
    for argument, following in pairwise([*arguments, "--"]):
        name, equals, value = argument.partition("=")
        if flag := names.get(name):
            found[flag] = value if equals else "" if following.startswith("--") else following
    return found
